# SPDX-License-Identifier: Apache-2.0
RECIPES: dict[str, int]
