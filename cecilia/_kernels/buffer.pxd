# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int8_t, int32_t, int64_t

from cecilia._kernels.isa cimport cec_acts

cdef void *aligned_zeros(int64_t nbytes) except NULL


cdef class Matrix:
    cdef float *p
    cdef readonly int64_t rows, cols
    cdef Py_ssize_t _shape[2]
    cdef Py_ssize_t _strides[2]


cdef class Vector:
    cdef float *p
    cdef readonly int64_t size


cdef class Activations:
    cdef cec_acts acts
    cdef readonly int64_t rows, cols
    cdef float *f
    cdef int8_t *q
    cdef float *d
    cdef float *s
    cdef int32_t *c
    cdef void put(self, int64_t row, const float *x) noexcept nogil


cdef class Fixed:
    cdef char *p
    cdef readonly int64_t nbytes


cdef class PageList:
    cdef char **pages
    cdef readonly int64_t count
    cdef int64_t capacity
    cdef int append(self, char *page) except -1
    cdef char *pop(self) noexcept
