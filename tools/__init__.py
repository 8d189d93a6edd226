# SPDX-License-Identifier: Apache-2.0
"""Command-line tools around model files. Leaves: nothing imports them."""
