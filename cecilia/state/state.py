# SPDX-License-Identifier: Apache-2.0
"""What a model keeps of the tokens it has seen."""

from __future__ import annotations

from dataclasses import dataclass

from cecilia._kernels.buffer import Fixed, PageList


@dataclass(frozen=True, slots=True)
class State:
    """`pages` grow with the sequence, `fixed` does not: the states of recurrent layers, or no bytes."""

    pages: PageList
    fixed: Fixed
