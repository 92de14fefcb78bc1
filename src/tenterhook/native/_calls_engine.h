/* The engine of one capture on the native path: its clock, its order of events, the tables that it writes to. */
#ifndef TENTERHOOK_CALLS_ENGINE_H
#define TENTERHOOK_CALLS_ENGINE_H

#include <time.h>

#include "_calls_types.h"
#include "_dlpack.h"
#include "../stats/_kernel_api.h"

#define SAMPLED 13           /* as in capture.py: of so many handlers one is timed */
#define LARGE_BYTES 32768    /* the kernel gives the GIL back for what is larger, so that the lock of the rows has to be held */
#define DTYPES_KNOWN 19
enum { WORD_FORWARD, WORD_BACKWARD, WORD_CPU, WORDS };

typedef struct {
    PyObject_HEAD
    /* the framework */
    PyObject *graph_task, *grads_on, *saved_hooks, *inference_on, *modes_on, *is_neg, *is_view, *tensor_types, *dtype_names;
    PyObject *new_hooks, *export_owner;
    DLTensorOf export;
    /* the session, in Python */
    PyObject *before, *values_of, *value, *came, *fault, *calls_full, *values_full, *acquire, *release, *owner, *clock;
    PyObject *busy; /* tuple of containers: while one has something in it all goes the way through Python */
    PyObject *outer_passes;
    PyObject *arounds; /* id -> what stands around the calls of a module */
    PyObject *global_tables; /* tuple of the tables of hooks on all modules */
    /* where we are */
    PyObject *stack;
    unsigned long ident;
    long long thread, seq, origin_ns, pass_token, begun_ns, pause_ns;
    /* rows */
    PyObject *calls, *values, *measured;
    long long serial;
    int64_t call_words[WORDS], value_words[WORDS], dtype_words[DTYPES_KNOWN];
    long long calls_recorded, values_recorded, hook_ns;
    char closed, follows, wants_input, wants_output, wants_grad_output, measures, plain;
    char unsure; /* whether an exception may go past us: there are hooks, or one that hooks do not see has come */
} Engine;

#define EACH_OBJECT_OF_AN_ENGINE(DO)                                                                                    \
    DO(graph_task) DO(grads_on) DO(saved_hooks) DO(inference_on) DO(modes_on) DO(is_neg) DO(is_view) DO(tensor_types) DO(dtype_names) \
    DO(new_hooks) DO(export_owner) DO(before) DO(values_of) DO(value) DO(came) DO(fault) DO(calls_full) DO(values_full)  \
    DO(acquire) DO(release) DO(owner) DO(clock) DO(busy) DO(outer_passes) DO(global_tables) DO(arounds) DO(stack) DO(calls) DO(values) DO(measured)

static PyTypeObject *Engine_Type;
static const KernelApi *kernel;
static PyObject *name_hooks, *name_grad_fn, *name_requires_grad, *name_register, *port_key;

static long long now_ns(Engine *self)
{
#if defined(__linux__)
    struct timespec time;
    (void)self;
    clock_gettime(CLOCK_MONOTONIC, &time); /* what time.perf_counter_ns() reads */
    return (long long)time.tv_sec * 1000000000LL + time.tv_nsec - self->origin_ns;
#else
    PyObject *now = PyObject_CallNoArgs(self->clock);
    long long read = now ? PyLong_AsLongLong(now) : 0;
    Py_XDECREF(now);
    return read - self->origin_ns;
#endif
}

static PyObject *engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *capsule, *clock;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OO", &capsule, &clock)) return NULL;
    DLTensorOf export = dltensor_function(capsule);
    if (!export) return NULL;
    Engine *self = (Engine *)allocate(type);
    if (!self) return NULL;
    self->export = export;
    put(&self->export_owner, capsule);
    put(&self->clock, clock);
    self->pass_token = -2;
    return (PyObject *)self;
}

static int engine_traverse(PyObject *object, visitproc visit, void *arg)
{
    Engine *self = (Engine *)object;
#define DO(name) Py_VISIT(self->name);
    EACH_OBJECT_OF_AN_ENGINE(DO)
#undef DO
    Py_VISIT(Py_TYPE(object));
    return 0;
}

static int engine_clear(PyObject *object)
{
    Engine *self = (Engine *)object;
#define DO(name) Py_CLEAR(self->name);
    EACH_OBJECT_OF_AN_ENGINE(DO)
#undef DO
    return 0;
}

static void engine_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    engine_clear(object);
    release_object(object);
}

static PyObject *engine_iter(PyObject *object)
{
    Py_INCREF(object);
    return object;
}

static PyObject *engine_next(PyObject *object) { return PyLong_FromLongLong(((Engine *)object)->seq++); }

static PyObject *engine_close(PyObject *object, PyObject *ignored)
{
    Engine *self = (Engine *)object;
    (void)ignored;
    self->closed = 1;
    Py_CLEAR(self->before);
    Py_CLEAR(self->values_of);
    Py_CLEAR(self->value);
    Py_CLEAR(self->came);
    Py_CLEAR(self->fault);
    Py_CLEAR(self->calls_full);
    Py_CLEAR(self->values_full);
    Py_CLEAR(self->owner);
    Py_CLEAR(self->stack);
    Py_RETURN_NONE;
}

static PyObject *engine_enter(PyObject *object, PyObject *args)
{
    Engine *self = (Engine *)object;
    PyObject *stack;
    long long thread;
    if (!PyArg_ParseTuple(args, "O!L", &PyList_Type, &stack, &thread)) return NULL;
    if (self->closed) Py_RETURN_NONE;
    put(&self->stack, stack);
    self->thread = thread;
    self->ident = PyThread_get_thread_ident();
    Py_RETURN_NONE;
}

static PyObject *engine_use(PyObject *object, PyObject *args)
{
    Engine *self = (Engine *)object;
    PyObject *calls, *values, *measured;
    if (!PyArg_ParseTuple(args, "O!O!O", Table_Type, &calls, Table_Type, &values, &measured)) return NULL;
    put(&self->calls, calls);
    put(&self->values, values);
    put(&self->measured, measured);
    self->serial++;
    for (int i = 0; i < WORDS; i++) self->call_words[i] = self->value_words[i] = -1;
    for (int i = 0; i < DTYPES_KNOWN; i++) self->dtype_words[i] = -1;
    Py_RETURN_NONE;
}

static int is_busy(Engine *self)
{
    if (!self->busy) return 1;
    Py_ssize_t count = PyTuple_Size(self->busy);
    for (Py_ssize_t i = 0; i < count; i++)
        if (PyObject_Size(PyTuple_GetItem(self->busy, i)) != 0) return 1;
    return 0;
}

/* Calls a function of the framework without arguments; 1, 0, or -1 with an exception set. */
static int asks(PyObject *function)
{
    PyObject *answer = PyObject_CallNoArgs(function);
    if (!answer) return -1;
    int is = answer == Py_True;
    Py_DECREF(answer);
    return is;
}

static long long running_task(Engine *self)
{
    PyObject *answer = PyObject_CallNoArgs(self->graph_task);
    long long task = answer ? PyLong_AsLongLong(answer) : -2;
    Py_XDECREF(answer);
    return task;
}

static int64_t known_word(Table *table, int64_t *codes, int which, PyObject *word)
{
    if (codes[which] < 0) codes[which] = table_code(table, word);
    return codes[which];
}

/* Returns the code of a site in a table; negative with an exception set. Where the tables were handed over in the meantime (Python
 * makes the site) the code says nothing: the caller has to look whether `serial` has changed. */
static int64_t site_code(Engine *self, Place *place, Table *table, int which, const char *kind)
{
    Known *known = &place->sites[which];
    long long serial = self->serial;
    if (known->serial == serial) return known->code;
    Py_INCREF(table); /* other threads may hand it over meanwhile; the code is of this one then, not of the next */
    PyObject *site = PyObject_CallMethod((PyObject *)place, "site", "ss", kind, "");
    int64_t code = site ? table_code(table, site) : -2;
    Py_XDECREF(site);
    Py_DECREF(table);
    if (code >= 0) {
        known->code = code;
        known->serial = serial;
    }
    return code;
}

/* The same of a shape: to make a tuple may set the garbage collector off, and so anything. */
static int64_t shape_code(Engine *self, Place *place, Table *table, int which, const DLTensor *tensor)
{
    Known *known = &place->shapes[which];
    int dims = tensor->ndim;
    size_t bytes = sizeof(int64_t) * (size_t)dims;
    long long serial = self->serial;
    if (known->serial == serial && known->dims == dims && !memcmp(known->sizes, tensor->shape, bytes)) return known->code;
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
    known->serial = serial;
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
        site = site_code(self, (Place *)call->watched, table, SITE_CALL, "");
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
    if (self->measures && numel_of(found) >= THREADED) return 0; /* Python says how many threads the framework has just now */
    int modes = asks(self->modes_on); /* of the user's, which would see what is asked */
    if (modes) return modes < 0 ? -1 : 0;
    PyObject *negated = PyObject_CallFunctionObjArgs(self->is_neg, tensor, NULL);
    if (!negated) return -1;
    Py_DECREF(negated);
    return negated == Py_False;
}

/* Records a plain tensor; returns the number of the event, or -1 with an exception set. */
static long long add_value(Engine *self, Call *call, const DLTensor *tensor, int dtype, int backward)
{
    int64_t numel = numel_of(tensor);
    int large = self->measures && numel * (tensor->dtype.bits / 8) > LARGE_BYTES;
    if (large && make_room(self->acquire)) return -1;
    long long seq = -1;
    int failed = 1;
    Table *table;
    long long serial;
    Place *place = (Place *)call->watched;
    int which = backward ? SITE_GRADIENT : SITE_OUTPUT;
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
        site = site_code(self, place, table, which, backward ? "grad_output" : "output");
        if (site < 0) goto end;
        shape = serial == self->serial ? shape_code(self, place, table, which, tensor) : 0;
        if (shape < 0) goto end;
    } while (serial != self->serial || table->reserved >= table->capacity);
    int64_t phase = known_word(table, self->value_words, backward ? WORD_BACKWARD : WORD_FORWARD,
                               backward ? word_backward : word_forward);
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
    cells[V_CALL_SEQ] = backward ? call->backward_seq : call->seq;
    cells[V_STEP] = call->step;
    cells[V_CALL] = call->number;
    cells[V_PHASE] = phase;
    cells[V_PASS] = backward ? call->pass_number : 0;
    cells[V_SHAPE] = shape;
    cells[V_SHARD] = NO_NUMBER;
    cells[V_DTYPE] = name;
    cells[V_DEVICE] = device;
    cells[V_TENSOR] = cells[V_NOTE] = NO_NUMBER;
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

/* A fault of ours: Python decides whether it is raised or ends the recording. Returns what the hook returns. */
static PyObject *our_fault(Engine *self)
{
    PyObject *kind, *error, *traceback;
    PyErr_Fetch(&kind, &error, &traceback);
    PyErr_NormalizeException(&kind, &error, &traceback);
    if (!self->fault || !error || !PyErr_GivenExceptionMatches(kind, PyExc_Exception)) {
        PyErr_Restore(kind, error, traceback);
        return NULL;
    }
    if (traceback) PyException_SetTraceback(error, traceback);
    PyObject *done = tell(self->fault, PyTuple_Pack(1, error));
    Py_XDECREF(kind);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    return done;
}

static PyMethodDef engine_methods[] = {
    {"enter", engine_enter, METH_VARARGS, "enter(stack, thread): this thread's calls take the native path from now on."},
    {"use", engine_use, METH_VARARGS, "use(calls, values, measured): write to these tables, measure into these rows."},
    {"close", engine_close, METH_NOARGS, "close(): do nothing any more, and let go of the session."},
    {NULL, NULL, 0, NULL},
};

#define OBJECT(name) {#name, T_OBJECT, offsetof(Engine, name), 0, NULL}
#define NUMBER(name) {#name, T_LONGLONG, offsetof(Engine, name), 0, NULL}
#define FLAG(name) {#name, T_BOOL, offsetof(Engine, name), 0, NULL}
static PyMemberDef engine_members[] = {
    OBJECT(graph_task), OBJECT(grads_on), OBJECT(saved_hooks), OBJECT(inference_on), OBJECT(modes_on), OBJECT(is_neg), OBJECT(is_view),
    OBJECT(tensor_types), OBJECT(dtype_names), OBJECT(new_hooks), OBJECT(before), OBJECT(values_of), OBJECT(value),
    OBJECT(came), OBJECT(fault), OBJECT(calls_full), OBJECT(values_full), OBJECT(acquire), OBJECT(release), OBJECT(owner),
    OBJECT(busy), OBJECT(outer_passes), OBJECT(global_tables), OBJECT(arounds), NUMBER(seq), NUMBER(origin_ns), NUMBER(pass_token), NUMBER(begun_ns), NUMBER(pause_ns), NUMBER(calls_recorded),
    NUMBER(values_recorded), NUMBER(hook_ns), FLAG(closed), FLAG(follows), FLAG(wants_input), FLAG(wants_output),
    FLAG(wants_grad_output), FLAG(measures), FLAG(plain), {NULL, 0, 0, 0, NULL},
};
#undef OBJECT
#undef NUMBER
#undef FLAG

static PyType_Slot engine_slots[] = {
    {Py_tp_new, engine_new},         {Py_tp_dealloc, engine_dealloc}, {Py_tp_traverse, engine_traverse},
    {Py_tp_clear, engine_clear},     {Py_tp_methods, engine_methods}, {Py_tp_members, engine_members},
    {Py_tp_iternext, engine_next},   {Py_tp_iter, engine_iter}, {Py_tp_doc, "Engine(exchange, clock): the native path of one session."},
    {0, NULL},
};

static PyType_Spec engine_spec = {.name = "tenterhook.native._calls.Engine",
                                  .basicsize = sizeof(Engine),
                                  .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                  .slots = engine_slots};

#endif
