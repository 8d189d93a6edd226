# SPDX-License-Identifier: Apache-2.0
from typing_extensions import Buffer

class Matrix:
    rows: int
    cols: int
    def __init__(self, rows: int, cols: int) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Vector:
    size: int
    def __init__(self, data: Buffer) -> None: ...

class Activations:
    rows: int
    cols: int
    def __init__(self, rows: int, cols: int, *, ints: bool) -> None: ...

class PageList:
    count: int
    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
