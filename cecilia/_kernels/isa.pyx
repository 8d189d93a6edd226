# SPDX-License-Identifier: Apache-2.0
"""Which instruction set the kernels use. This extension owns all C; the others reach it through table()."""

import os

from cecilia.errors import DeviceError

cdef const cec_table *active = NULL


cdef const cec_table *table() noexcept nogil:
    """The active kernel table; never NULL after import."""
    return active


def built():
    """Names of the instruction sets in this build, best first."""
    names = []
    cdef int i = 0
    while cec_tables[i] != NULL:
        names.append(cec_tables[i].name.decode())
        i += 1
    return tuple(names)


def available():
    """Names of the instruction sets this CPU can run, best first; the last is "scalar"."""
    names = []
    cdef int i = 0
    while cec_tables[i] != NULL:
        if cec_tables[i].usable():
            names.append(cec_tables[i].name.decode())
        i += 1
    return tuple(names)


def name():
    """Name of the active instruction set."""
    return active.name.decode()


def use(str wanted):
    """Make `wanted` the active instruction set; not while kernels run.

    Raises DeviceError `isa_unknown` or `isa_unavailable`.
    """
    global active
    cdef int i = 0
    encoded = wanted.encode()
    while cec_tables[i] != NULL:
        if cec_tables[i].name == encoded:
            if not cec_tables[i].usable():
                raise DeviceError(
                    "isa_unavailable", f"this CPU lacks {wanted}; it can run: {' '.join(available())}"
                )
            active = cec_tables[i]
            return
        i += 1
    raise DeviceError("isa_unknown", f"no instruction set {wanted!r}; this build has: {' '.join(built())}")


use(os.environ.get("CECILIA_ISA") or available()[0])
