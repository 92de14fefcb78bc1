/* What is used of DLPack 1: the layout of its tensors, and the function that describes a Python tensor without a copy.
 * Its definition: https://dmlc.github.io/dlpack/latest/c_api.html */
#ifndef TENTERHOOK_DLPACK_H
#define TENTERHOOK_DLPACK_H

#include <Python.h>
#include <stdint.h>

#define DL_CPU 1
enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_BOOL = 6 };

typedef struct {
    uint8_t code, bits;
    uint16_t lanes;
} DLDataType;

typedef struct {
    int32_t device_type, device_id;
} DLDevice;

typedef struct {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef int (*DLTensorOf)(void *object, DLTensor *out);

typedef struct ExchangeHeader {
    struct {
        uint32_t major, minor;
    } version;
    struct ExchangeHeader *older;
} ExchangeHeader;

typedef struct {
    ExchangeHeader header;
    void *allocate, *from_object, *to_object;
    DLTensorOf describe;
    void *stream;
} Exchange;

/* Returns the function that describes a tensor, of the capsule `type(tensor).__dlpack_c_exchange_api__`; NULL with an exception. */
static DLTensorOf dltensor_function(PyObject *capsule)
{
    ExchangeHeader *header = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!header) return NULL;
    while (header && header->version.major != 1) header = header->older;
    DLTensorOf describe = header ? ((Exchange *)header)->describe : NULL;
    if (!describe) PyErr_SetString(PyExc_TypeError, "the framework describes no tensors by DLPack 1");
    return describe;
}

/* Returns the place of a dtype among tenterhook.stats.DTYPE_CODES; -1 for those left to Python. */
static int dtype_code(DLDataType dtype)
{
    if (dtype.lanes != 1) return -1;
    int size = dtype.bits == 8 ? 0 : dtype.bits == 16 ? 1 : dtype.bits == 32 ? 2 : dtype.bits == 64 ? 3 : -1;
    if (size < 0) return -1;
    switch (dtype.code) {
    case DL_FLOAT: return size == 2 ? 0 : size == 3 ? 1 : size == 1 ? 2 : -1;
    case DL_BFLOAT: return size == 1 ? 3 : -1;
    case DL_INT: return size ? 8 + 2 * size : -1; /* torch's int1 to int7 are told as 8 bits, too: Python tells them apart */
    case DL_UINT: return size ? 9 + 2 * size : -1;
    case DL_BOOL: return size == 0 ? 16 : -1;
    default: return -1;
    }
}

#define LOW_ADDRESS ((uintptr_t)1 << 36)
#define THREADED 262144 /* rows.THREADED_NUMEL */

static int64_t numel_of(const DLTensor *tensor)
{
    int64_t numel = 1;
    for (int i = 0; i < tensor->ndim; i++) numel *= tensor->shape[i];
    return numel;
}

/* Whether there is memory behind a tensor: one that was let go (`storage.resize_(0)`, as FSDP does), and one of nothing but zeros
 * in forward-mode differentiation, have their offset for an address. */
static int has_storage(PyObject *tensor)
{
    PyObject *storage = PyObject_CallMethod(tensor, "untyped_storage", NULL);
    PyObject *address = storage ? PyObject_CallMethod(storage, "data_ptr", NULL) : NULL;
    int has = address && PyObject_IsTrue(address) > 0;
    Py_XDECREF(storage);
    Py_XDECREF(address);
    PyErr_Clear(); /* what has no storage to ask is left to Python */
    return has;
}

/* How many elements lie between a tensor's first one and the end of its last: of one that has elements. */
static int64_t end_of(const DLTensor *found)
{
    int64_t end = 1, flat = 1;
    for (int i = found->ndim - 1; i >= 0; i--) {
        end += (found->shape[i] - 1) * (found->strides ? found->strides[i] : flat);
        flat *= found->shape[i];
    }
    return end;
}

/* Whether the storage of a tensor still has all of it, asked through Python. */
static int storage_holds(PyObject *tensor, const DLTensor *found)
{
    PyObject *storage = PyObject_CallMethod(tensor, "untyped_storage", NULL);
    PyObject *address = storage ? PyObject_CallMethod(storage, "data_ptr", NULL) : NULL;
    PyObject *size = storage ? PyObject_CallMethod(storage, "nbytes", NULL) : NULL;
    uint64_t first = address ? PyLong_AsUnsignedLongLong(address) : 0, bytes = size ? PyLong_AsUnsignedLongLong(size) : 0;
    int holds = !PyErr_Occurred()
                && (uintptr_t)found->data + found->byte_offset + (uint64_t)end_of(found) * (found->dtype.bits / 8) <= first + bytes;
    Py_XDECREF(storage);
    Py_XDECREF(address);
    Py_XDECREF(size);
    PyErr_Clear(); /* what has no storage to ask is left to Python */
    return holds;
}

#endif
