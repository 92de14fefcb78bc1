/* The native kernel: statistics, sketch and digest of memory in one pass, written into the columns of a row buffer.
 *
 * tenterhook.stats.twin defines every number; this computes the same ones. CPython's limited API (3.10), so that one build
 * serves all later versions; memory comes as addresses.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_kernel_api.h"
#include "_kernel_sets.h"
#include "_kernel_measure.h"

#define GROUP_STATISTICS 1
#define GROUP_SKETCH 2
#define GROUP_DIGEST 4
#define STATISTICS_COUNT 11
#define RELEASE_BYTES 32768 /* below this, giving the GIL back and taking it again costs more than it frees */

typedef struct {
    PyObject_HEAD
    const Lanes *lanes;
    Py_ssize_t capacity;
    double *statistics;
    float *sketches;
    uint64_t *digests;
    uint8_t *valid;
    PyObject *codes; /* dict: dtype name -> code */
    PyObject *owner; /* keeps the columns alive */
} Rows;

static PyObject *rows_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    const char *name;
    Py_ssize_t capacity;
    PyObject *columns[4], *codes, *owner;
    void *pointers[4];
    if (kwargs && PyDict_Size(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "Rows takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "snO!O!O!O!O!O", &name, &capacity, &PyLong_Type, &columns[0], &PyLong_Type, &columns[1],
                          &PyLong_Type, &columns[2], &PyLong_Type, &columns[3], &PyDict_Type, &codes, &owner))
        return NULL;
    for (int i = 0; i < 4; i++) {
        pointers[i] = PyLong_AsVoidPtr(columns[i]);
        if (PyErr_Occurred()) return NULL;
    }
    const Lanes *found[3], *lanes = NULL;
    int count = available_lanes(found);
    for (int i = 0; i < count; i++)
        if (!strcmp(found[i]->name, name)) lanes = found[i];
    if (!lanes) return PyErr_Format(PyExc_ValueError, "this machine has no kernel '%s'", name);
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Rows *self = (Rows *)allocate(type, 0);
    if (!self) return NULL;
    self->lanes = lanes;
    self->capacity = capacity;
    self->statistics = pointers[0];
    self->sketches = pointers[1];
    self->digests = pointers[2];
    self->valid = pointers[3];
    Py_INCREF(codes);
    self->codes = codes;
    Py_INCREF(owner);
    self->owner = owner;
    return (PyObject *)self;
}

static void rows_dealloc(PyObject *object)
{
    Rows *self = (Rows *)object;
    PyTypeObject *type = Py_TYPE(object);
    Py_CLEAR(self->codes);
    Py_CLEAR(self->owner);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

/* Measures into a row whose number has been checked. */
static void fill_row(Rows *self, Py_ssize_t at, int dtype, Walk *walk, int64_t offset)
{
    Row row = {
        self->statistics + at * STATISTICS_COUNT,
        self->sketches ? self->sketches + at * BUCKETS : NULL,
        self->digests ? self->digests + at : NULL,
    };
    PyThreadState *thread = walk->numel * walk->itemsize > RELEASE_BYTES ? PyEval_SaveThread() : NULL;
    FloatMode mode = exact_subnormals();
    measure_walk(self->lanes, dtype, walk, offset, &row);
    restore_mode(mode);
    if (thread) PyEval_RestoreThread(thread);
    self->valid[at] = (uint8_t)(GROUP_STATISTICS | (row.sketch ? GROUP_SKETCH : 0) | (row.digest ? GROUP_DIGEST : 0));
}

static int bad_integer(PyObject *const *args, Py_ssize_t count, int64_t *values)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        values[i] = PyLong_AsLongLong(args[i]);
        if (values[i] == -1 && PyErr_Occurred()) return 1;
    }
    return 0;
}

static int bad_row(Rows *self, int64_t row, int64_t offset)
{
    if (row < 0 || row >= self->capacity) {
        PyErr_Format(PyExc_IndexError, "row %lld is outside the buffer, which has %zd rows", (long long)row, self->capacity);
        return 1;
    }
    if (offset < 0) {
        PyErr_Format(PyExc_ValueError, "offset must not be negative, got %lld", (long long)offset);
        return 1;
    }
    return 0;
}

static PyObject *unsupported(Rows *self, int64_t row)
{
    self->valid[row] = 0;
    Py_RETURN_FALSE;
}

static PyObject *rows_measure_flat(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    Rows *self = (Rows *)object;
    if (nargs < 4 || nargs > 5)
        return PyErr_Format(PyExc_TypeError, "measure_flat(row, address, dtype_code, numel, offset=0) got %zd arguments", nargs);
    void *address = PyLong_AsVoidPtr(args[1]);
    if (!address && PyErr_Occurred()) return NULL;
    int64_t row, rest[3] = {0, 0, 0}; /* dtype code, numel, offset */
    if (bad_integer(args, 1, &row) || bad_integer(args + 2, nargs - 2, rest) || bad_row(self, row, rest[2])) return NULL;
    if (rest[1] < 0) return PyErr_Format(PyExc_ValueError, "numel must not be negative, got %lld", (long long)rest[1]);
    if (rest[0] < 0 || rest[0] >= DTYPE_COUNT) return unsupported(self, row);
    Walk walk; /* not initialised as a whole: it is long, and only the dimensions in use are read */
    walk.first = address;
    walk.itemsize = ITEMSIZE[rest[0]];
    walk.dims = 0;
    walk.numel = rest[1];
    walk_push(&walk, rest[1], walk.itemsize);
    fill_row(self, row, (int)rest[0], &walk, rest[2]);
    Py_RETURN_TRUE;
}

/* Reads the shape and the strides (in elements) into `walk`; 0 with an exception set where they are none. */
static int read_layout(PyObject *shape, PyObject *strides, Walk *walk)
{
    if (!PyTuple_Check(shape) || !PyTuple_Check(strides) || PyTuple_Size(shape) != PyTuple_Size(strides)) {
        PyErr_SetString(PyExc_ValueError, "shape and strides must be tuples of the same length");
        return 0;
    }
    Py_ssize_t dims = PyTuple_Size(shape);
    int empty = 0, fits = 1;
    walk->numel = 1;
    walk->dims = 0;
    for (Py_ssize_t i = 0; i < dims; i++) {
        PyObject *pair[2] = {PyTuple_GetItem(shape, i), PyTuple_GetItem(strides, i)};
        int64_t values[2], stride;
        if (bad_integer(pair, 2, values)) return 0;
        if (values[0] < 0) {
            PyErr_Format(PyExc_ValueError, "sizes must not be negative, got %lld", (long long)values[0]);
            return 0;
        }
        empty |= values[0] == 0;
        if (empty || values[0] == 1) continue;
        fits = fits && !__builtin_mul_overflow(walk->numel, values[0], &walk->numel)
               && !__builtin_mul_overflow(values[1], (int64_t)walk->itemsize, &stride) && walk_push(walk, values[0], stride);
    }
    if (empty) {
        walk->numel = 0;
        return 1;
    }
    if (!fits || walk->numel > INT64_MAX / 16) {
        PyErr_SetString(PyExc_ValueError, "the shape holds more elements than memory can");
        return 0;
    }
    return 1;
}

static PyObject *rows_measure(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    Rows *self = (Rows *)object;
    if (nargs < 5 || nargs > 6)
        return PyErr_Format(PyExc_TypeError, "measure(row, address, dtype, shape, strides, offset=0) got %zd arguments", nargs);
    void *address = PyLong_AsVoidPtr(args[1]);
    if (!address && PyErr_Occurred()) return NULL;
    int64_t row, offset = 0, dtype;
    if (bad_integer(args, 1, &row) || bad_integer(args + 5, nargs - 5, &offset) || bad_row(self, row, offset)) return NULL;
    PyObject *code = PyDict_GetItemWithError(self->codes, args[2]);
    if (!code) return PyErr_Occurred() ? NULL : unsupported(self, row);
    if (bad_integer(&code, 1, &dtype)) return NULL;
    if (dtype < 0 || dtype >= DTYPE_COUNT) return unsupported(self, row);
    Walk walk;
    walk.first = address;
    walk.itemsize = ITEMSIZE[dtype];
    if (!read_layout(args[3], args[4], &walk)) return NULL;
    fill_row(self, row, (int)dtype, &walk, offset);
    Py_RETURN_TRUE;
}

static PyTypeObject *rows_type;

static int api_measure(PyObject *object, int64_t row, int dtype, const void *address, int dims, const int64_t *sizes,
                       const int64_t *strides)
{
    Rows *self = (Rows *)object;
    if (Py_TYPE(object) != rows_type) {
        PyErr_SetString(PyExc_TypeError, "these are no rows of the native kernel");
        return -1;
    }
    if (bad_row(self, row, 0)) return -1;
    if (dtype < 0 || dtype >= DTYPE_COUNT) {
        self->valid[row] = 0;
        return 0;
    }
    Walk walk;
    walk.first = address;
    walk.itemsize = ITEMSIZE[dtype];
    walk.dims = 0;
    walk.numel = 1;
    for (int i = 0; i < dims; i++) walk.numel *= sizes[i];
    for (int i = 0; walk.numel && i < dims; i++)
        if ((!strides || sizes[i] != 1) && !walk_push(&walk, sizes[i], strides ? strides[i] * walk.itemsize : walk.itemsize)) {
            PyErr_SetString(PyExc_ValueError, "the tensor has more dimensions than can be walked");
            return -1;
        }
    fill_row(self, row, dtype, &walk, 0);
    return 1;
}

static const KernelApi kernel_api = {api_measure};

static PyMethodDef rows_methods[] = {
    {"measure_flat", (PyCFunction)(void (*)(void))rows_measure_flat, METH_FASTCALL,
     "measure_flat(row, address, dtype_code, numel, offset=0) -> bool: measure contiguous memory."},
    {"measure", (PyCFunction)(void (*)(void))rows_measure, METH_FASTCALL,
     "measure(row, address, dtype, shape, strides, offset=0) -> bool: measure strided memory; strides in elements."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot rows_slots[] = {
    {Py_tp_new, rows_new},
    {Py_tp_dealloc, rows_dealloc},
    {Py_tp_methods, rows_methods},
    {Py_tp_doc, "Rows(kernel, capacity, statistics, sketches, digests, valid, codes, owner): columns given by their addresses."},
    {0, NULL},
};

static PyType_Spec rows_spec = {
    .name = "tenterhook.stats._kernel.Rows",
    .basicsize = sizeof(Rows),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = rows_slots,
};

static PyObject *variants(PyObject *module, PyObject *ignored)
{
    (void)module, (void)ignored;
    const Lanes *found[3];
    int count = available_lanes(found);
    PyObject *names = PyTuple_New(count);
    for (int i = 0; names && i < count; i++) {
        PyObject *name = PyUnicode_FromString(found[i]->name);
        if (!name || PyTuple_SetItem(names, i, name) < 0) Py_CLEAR(names);
    }
    return names;
}

static PyObject *set_threads(PyObject *module, PyObject *count)
{
    (void)module;
    long wanted = PyLong_AsLong(count);
    if (wanted == -1 && PyErr_Occurred()) return NULL;
    if (wanted < 1) return PyErr_Format(PyExc_ValueError, "the number of threads must be 1 or more, got %ld", wanted);
    atomic_store(&threads_wanted, wanted > MAX_THREADS ? MAX_THREADS : (int)wanted);
    Py_RETURN_NONE;
}

static PyObject *threads(PyObject *module, PyObject *ignored)
{
    (void)module, (void)ignored;
    return PyLong_FromLong(atomic_load(&threads_wanted));
}

static PyMethodDef module_methods[] = {
    {"set_threads", set_threads, METH_O, "set_threads(count): how many threads, the caller's own among them, measure a large tensor."},
    {"threads", threads, METH_NOARGS, "threads() -> int: what set_threads was told last; 1 at first."},
    {"variants", variants, METH_NOARGS, "variants() -> tuple[str, ...]: the kernels of this machine, the fastest first."},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module)
{
    fill_tables();
    prepare_threads();
    PyObject *type = PyType_FromSpec(&rows_spec);
    if (!type) return -1;
    rows_type = (PyTypeObject *)type;
    int failed = PyModule_AddObjectRef(module, "Rows", type);
    Py_DECREF(type);
    PyObject *api = PyCapsule_New((void *)&kernel_api, KERNEL_API_NAME, NULL);
    failed = failed || !api || PyModule_AddObjectRef(module, "api", api);
    Py_XDECREF(api);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "tenterhook.stats._kernel",
    .m_doc = "Statistics, sketch and digest of memory in one pass.",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModuleDef_Init(&module_definition); }
