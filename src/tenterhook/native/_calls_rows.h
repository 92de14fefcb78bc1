/* Rows: what is written down of a call and of a tensor. */
#ifndef TENTERHOOK_CALLS_ROWS_H
#define TENTERHOOK_CALLS_ROWS_H

#include "_calls_engine.h"

static int64_t known_word(Table *table, int64_t *codes, int which, PyObject *word)
{
    if (codes[which] < 0) codes[which] = table_code(table, word);
    return codes[which];
}

/* Returns the code of a site in a table; negative with an exception set. Where the tables were handed over in the meantime (Python
 * makes the site) the code may say nothing: the caller has to look whether the engine's `serial` has changed. */
static int64_t site_code(Place *place, Table *table, int which, const char *kind)
{
    Known *known = &place->sites[which];
    if (known->lineage == table->lineage) return known->code;
    Py_INCREF(table); /* other threads may hand it over meanwhile */
    PyObject *site = PyObject_CallMethod((PyObject *)place, "site", "ss", kind, "");
    int64_t code = site ? table_code(table, site) : -2;
    Py_XDECREF(site);
    if (code >= 0) {
        known->code = code;
        known->lineage = table->lineage;
    }
    Py_DECREF(table);
    return code;
}

/* The same of a shape: to make a tuple may set the garbage collector off, and so anything. */
static int64_t shape_code(Engine *self, Known *known, Table *table, const DLTensor *tensor)
{
    int dims = tensor->ndim;
    size_t bytes = sizeof(int64_t) * (size_t)dims;
    long long serial = self->serial;
    if (known->lineage == table->lineage && known->dims == dims && !memcmp(known->sizes, tensor->shape, bytes)) return known->code;
    PyObject *shape = PyTuple_New(dims); /* may collect garbage, which runs Python */
    if (serial != self->serial) {
        Py_XDECREF(shape);
        return shape ? 0 : -2; /* the caller sees that the table is another one */
    }
    for (int i = 0; shape && i < dims; i++) {
        PyObject *size = PyLong_FromLongLong(tensor->shape[i]);
        if (!size || PyTuple_SetItem(shape, i, size)) Py_CLEAR(shape);
    }
    if (!shape) return -2;
    if (serial != self->serial) {
        Py_DECREF(shape);
        return 0;
    }
    int64_t code = table_code(table, shape);
    Py_DECREF(shape);
    if (code < 0 || dims > CACHED_DIMS) return code;
    known->code = code;
    known->dims = dims;
    if (bytes) memcpy(known->sizes, tensor->shape, bytes);
    known->lineage = table->lineage;
    return code;
}

/* Has Python hand a full table over; another thread may have closed the session, which has let go of that then. */
static int make_room(PyObject *hand_over)
{
    PyObject *done = tell(hand_over, PyTuple_New(0));
    Py_XDECREF(done);
    return done ? 0 : -1;
}

enum { /* the order of CALL_ITEMS and of VALUE_ITEMS in recording/blocks.py */
    C_SITE, C_SEQ, C_STEP, C_CALL, C_PHASE, C_PASS, C_DEPTH, C_PARENT, C_FORWARD, C_THREAD, C_START, C_DURATION, C_ERROR,
    C_SOURCE, CALL_WIDTH
};
enum {
    V_ROW, V_SITE, V_SEQ, V_CALL_SEQ, V_STEP, V_CALL, V_PHASE, V_PASS, V_SHAPE, V_SHARD, V_DTYPE, V_DEVICE, V_TENSOR, V_NOTE,
    VALUE_WIDTH
};

/* Adds the row of a call: of its forward where `duration` is not negative, else of a backward pass. 0, or -1 with an exception. */
static int add_call(Engine *self, Call *call, Call *parent, long long start, long long duration)
{
    Table *table;
    long long serial;
    int64_t site, phase;
    int backward = duration < 0;
    do { /* a site is made by Python, where other threads may hand the table over */
        serial = self->serial;
        if (((Table *)self->calls)->used >= ((Table *)self->calls)->capacity && make_room(self->calls_full)) return -1;
        if (self->closed) return 0;
        table = (Table *)self->calls;
        site = site_code((Place *)call->watched, table, SITE_CALL, "");
        if (site < 0) return -1;
    } while (serial != self->serial || table->used >= table->capacity);
    phase = known_word(table, self->call_words, backward ? WORD_BACKWARD : WORD_FORWARD, backward ? word_backward : word_forward);
    if (phase < 0) return -1;
    int64_t *cells = table->memory + table->used * table->width;
    cells[C_SITE] = site;
    cells[C_SEQ] = backward ? call->backward_seq : call->seq;
    cells[C_STEP] = call->step;
    cells[C_CALL] = call->number;
    cells[C_PHASE] = phase;
    cells[C_PASS] = backward ? call->pass_number : 0;
    cells[C_DEPTH] = backward ? call->backward_depth : call->depth;
    cells[C_PARENT] = !parent ? NO_NUMBER : backward ? parent->backward_seq : parent->seq;
    cells[C_FORWARD] = backward ? call->seq : NO_NUMBER;
    cells[C_THREAD] = backward ? self->thread : call->thread;
    cells[C_START] = start;
    cells[C_DURATION] = backward ? NO_NUMBER : duration;
    cells[C_ERROR] = cells[C_SOURCE] = NO_NUMBER;
    table->used++;
    self->calls_recorded++;
    return 0;
}

static int is_flat(const DLTensor *tensor)
{
    if (!tensor->strides) return 1;
    int64_t expected = 1;
    for (int i = tensor->ndim - 1; i >= 0; i--) {
        if (tensor->shape[i] == 1) continue;
        if (tensor->strides[i] != expected) return 0;
        expected *= tensor->shape[i];
    }
    return 1;
}

/* Whether the kernel has been told of as many threads as the framework has just now. */
static int threads_agree(Engine *self)
{
    if (!self->threads || !self->kernel_threads) return 0;
    PyObject *wanted = PyObject_CallNoArgs(self->threads), *told = wanted ? PyObject_CallNoArgs(self->kernel_threads) : NULL;
    int agree = told ? PyObject_RichCompareBool(wanted, told, Py_EQ) : -1;
    Py_XDECREF(wanted);
    Py_XDECREF(told);
    if (agree < 0) PyErr_Clear(); /* Python asks again, and raises it */
    return agree > 0;
}

typedef int32_t (*AskStorage)(void *handle, int64_t *answer); /* of libtorch's stable functions: not 0 where it has failed */

/* Whether the storage of a tensor still has all of it: `storage.resize_()` may have made it smaller. */
static int has_all(const Engine *self, PyObject *tensor, const DLTensor *found)
{
    if (!numel_of(found)) return 1;
    if (!self->storage_place) return storage_holds(tensor, found);
    void *handle = (char *)tensor + self->storage_place;
    int64_t size, first;
    if (((AskStorage)(uintptr_t)self->storage_size)(handle, &size)) return 0;
    if (((AskStorage)(uintptr_t)self->storage_offset)(handle, &first)) return 0;
    return (first + end_of(found)) * (found->dtype.bits / 8) <= size;
}

/* Looks at a tensor: 1 where it is plain, dense and on the host, 0 where Python has to look, -1 with an exception set. */
static int is_plain(Engine *self, PyObject *tensor, DLTensor *found, int *dtype)
{
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    Py_ssize_t count = PyTuple_Size(self->tensor_types), at = 0;
    while (at < count && PyTuple_GetItem(self->tensor_types, at) != type) at++;
    if (at == count) return 0;
    if (self->export(tensor, found)) { /* no storage of its own: a wrapper of functorch, sparse, quantised ... */
        PyErr_Clear();
        return 0;
    }
    *dtype = dtype_code(found->dtype);
    if (*dtype < 0 || found->device.device_type != DL_CPU || found->ndim > 32) return 0;
    if ((uintptr_t)found->data < LOW_ADDRESS && !has_storage(tensor)) return 0;
    if (self->measures && numel_of(found) >= THREADED && !threads_agree(self)) return 0; /* Python tells the kernel */
    int modes = asks(self->modes_on); /* of the user's, which would see what is asked */
    if (modes) return modes < 0 ? -1 : 0;
    if (self->measures && !has_all(self, tensor, found)) return 0;
    PyObject *negated = PyObject_CallFunctionObjArgs(self->is_neg, tensor, NULL);
    if (!negated) return -1;
    Py_DECREF(negated);
    return negated == Py_False;
}

typedef struct { /* what a tensor is of: of a call, or else of a site */
    Call *call;
    int backward;
    PyObject *site;
    long long step;
} Subject;

static int64_t subject_site(const Subject *of, Table *table)
{
    if (!of->call) return table_code(table, of->site);
    Place *place = (Place *)of->call->watched;
    return of->backward ? site_code(place, table, SITE_GRADIENT, "grad_output") : site_code(place, table, SITE_OUTPUT, "output");
}

/* Where the shape is remembered that the tensor before this one had. */
static Known *subject_shape(Engine *self, const Subject *of, const DLTensor *tensor)
{
    if (!of->call) return &self->shapes[tensor->ndim % SHAPES];
    return &((Place *)of->call->watched)->shapes[of->backward ? SITE_GRADIENT : SITE_OUTPUT];
}

/* Writes all of a row but its number, its site and its shape. */
static void describe_subject(const Subject *of, int64_t *cells, int64_t phase)
{
    Call *call = of->call;
    cells[V_CALL_SEQ] = !call ? NO_NUMBER : of->backward ? call->backward_seq : call->seq;
    cells[V_STEP] = call ? call->step : of->step;
    cells[V_CALL] = call ? call->number : NO_NUMBER;
    cells[V_PHASE] = call ? phase : NO_NUMBER;
    cells[V_PASS] = !call ? NO_NUMBER : of->backward ? call->pass_number : 0;
    cells[V_SHARD] = cells[V_TENSOR] = cells[V_NOTE] = NO_NUMBER;
}

/* Records a plain tensor; returns the number of the event, or -1 with an exception set. */
static long long add_value(Engine *self, const Subject *of, const DLTensor *tensor, int dtype)
{
    int64_t numel = numel_of(tensor);
    int large = self->measures && numel * (tensor->dtype.bits / 8) > LARGE_BYTES;
    if (large && make_room(self->acquire)) return -1;
    long long seq = -1;
    int failed = 1;
    Table *table;
    long long serial;
    int64_t site, shape;
    do {
        serial = self->serial;
        if (((Table *)self->values)->reserved >= ((Table *)self->values)->capacity && make_room(self->values_full)) goto end;
        if (self->closed) { /* a fault in handing over has ended the session */
            failed = 0;
            seq = self->seq;
            goto end;
        }
        table = (Table *)self->values;
        site = subject_site(of, table);
        if (site < 0) goto end;
        shape = serial == self->serial ? shape_code(self, subject_shape(self, of, tensor), table, tensor) : 0;
        if (shape < 0) goto end;
    } while (serial != self->serial || table->reserved >= table->capacity);
    int64_t phase = known_word(table, self->value_words, of->backward ? WORD_BACKWARD : WORD_FORWARD,
                               of->backward ? word_backward : word_forward);
    int64_t device = known_word(table, self->value_words, WORD_CPU, PyTuple_GetItem(self->dtype_names, DTYPES_KNOWN));
    int64_t name = known_word(table, self->dtype_words, dtype, PyTuple_GetItem(self->dtype_names, dtype));
    if (phase < 0 || device < 0 || name < 0) goto end;
    seq = self->seq++;
    int64_t row = table->reserved++;
    if (self->measures) {
        void *first = (char *)tensor->data + tensor->byte_offset;
        int flat = is_flat(tensor);
        if (kernel->measure(self->measured, row, dtype, first, flat ? 1 : tensor->ndim, flat ? &numel : tensor->shape,
                            flat ? NULL : tensor->strides) < 0)
            goto end;
    }
    int64_t *cells = table->memory + table->used * table->width;
    cells[V_ROW] = row;
    cells[V_SITE] = site;
    cells[V_SEQ] = seq;
    cells[V_SHAPE] = shape;
    cells[V_DTYPE] = name;
    cells[V_DEVICE] = device;
    describe_subject(of, cells, phase);
    table->used++;
    self->values_recorded++;
    failed = 0;
end:
    if (large) {
        PyObject *kind, *error, *traceback;
        PyErr_Fetch(&kind, &error, &traceback);
        failed |= make_room(self->release);
        if (kind) PyErr_Restore(kind, error, traceback);
    }
    return failed ? -1 : seq;
}

/* Records a plain tensor that belongs to no call; False where Python has to. */
static PyObject *engine_record(PyObject *object, PyObject *args)
{
    Engine *self = (Engine *)object;
    PyObject *tensor;
    Subject of = {0};
    DLTensor found;
    int dtype;
    if (!PyArg_ParseTuple(args, "OOL", &of.site, &tensor, &of.step)) return NULL;
    if (self->closed || !self->values) Py_RETURN_FALSE;
    int plain = is_plain(self, tensor, &found, &dtype);
    if (plain <= 0) return plain < 0 ? NULL : PyBool_FromLong(0);
    if (add_value(self, &of, &found, dtype) < 0) return NULL;
    Py_RETURN_TRUE;
}

#endif
