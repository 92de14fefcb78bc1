/* The kernel's function for other extensions of this package; in the capsule `tenterhook.stats._kernel.api`. */
#ifndef TENTERHOOK_KERNEL_API_H
#define TENTERHOOK_KERNEL_API_H

#include <Python.h>
#include <stdint.h>

#define KERNEL_API_NAME "tenterhook.stats._kernel.api"

typedef struct {
    /* Measures into a row of a Rows object: 1, 0 where the dtype is not supported, -1 with an exception set. Strides are in
     * elements; NULL for contiguous memory, given as one dimension. */
    int (*measure)(PyObject *rows, int64_t row, int dtype, const void *address, int dims, const int64_t *sizes,
                   const int64_t *strides);
} KernelApi;

#endif
