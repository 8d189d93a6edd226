# SPDX-License-Identifier: Apache-2.0
"""Speed: this engine alone, beside llama.cpp, and the weight layouts it could have had."""
