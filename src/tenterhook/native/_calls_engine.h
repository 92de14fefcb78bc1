/* The engine of one capture on the native path: its clock, its order of events, the tables that it writes to. */
#ifndef TENTERHOOK_CALLS_ENGINE_H
#define TENTERHOOK_CALLS_ENGINE_H

#include <time.h>

#include "_calls_places.h"
#include "_dlpack.h"
#include "../stats/_kernel_api.h"

#define SAMPLED 13           /* as in capture.py: of so many handlers one is timed */
#define LARGE_BYTES 32768    /* the kernel gives the GIL back for what is larger, so that the lock of the rows has to be held */
#define DTYPES_KNOWN 21      /* how many tenterhook.stats.DTYPE_CODES has */
#define SHAPES 4
enum { WORD_FORWARD, WORD_BACKWARD, WORD_CPU, WORDS };

typedef struct {
    PyObject_HEAD
    /* the framework */
    PyObject *graph_task, *grads_on, *forward_ad_on, *saved_hooks, *inference_on, *modes_on, *is_neg, *is_view, *threads, *kernel_threads, *tensor_types, *dtype_names;
    PyObject *new_hooks, *export_owner, *tracing, *call, *call_impl;
    DLTensorOf export;
    /* the session, in Python */
    PyObject *before, *values_of, *value, *came, *fault, *calls_full, *values_full, *acquire, *release, *owner, *clock;
    PyObject *busy; /* tuple of containers: while one has something in it all goes the way through Python */
    PyObject *outer_passes;
    PyObject *arounds; /* dict, whose keys stand around the calls of modules now; each is counted once */
    PyObject *global_tables; /* tuple of the tables of hooks on all modules */
    PyObject *stacks; /* thread -> its running calls */
    PyObject *notices; /* as `busy`, for calls that begin a step */
    /* where we are */
    PyObject *stack;
    unsigned long ident;
    long long thread, seq, origin_ns, pass_token, begun_ns, pause_ns;
    /* rows */
    PyObject *calls, *values, *measured;
    long long serial;
    int64_t call_words[WORDS], value_words[WORDS], dtype_words[DTYPES_KNOWN];
    Known shapes[SHAPES]; /* of tensors that belong to no call */
    long long calls_recorded, values_recorded, hook_ns;
    long long storage_place, storage_size, storage_offset; /* where a tensor's handle is in it, and the functions that take that; or 0 */
    char closed, follows, wants_input, wants_output, wants_grad_output, measures, plain;
    /* steps that are not recorded (_calls_resting.h) */
    PyObject *resting; /* the place whose calls end them */
    long long step, due_step, rest_until, rest_token, rest_thread, rest_serial, rest_calls, rest_values;
    char rest_tracks;
    char unsure; /* whether an exception may go past us: there are hooks, or one that hooks do not see has come */
} Engine;

#define EACH_OBJECT_OF_AN_ENGINE(DO)                                                                                    \
    DO(graph_task) DO(grads_on) DO(forward_ad_on) DO(saved_hooks) DO(inference_on) DO(modes_on) DO(is_neg) DO(is_view) DO(threads) DO(kernel_threads) DO(tensor_types) DO(dtype_names) \
    DO(new_hooks) DO(export_owner) DO(tracing) DO(call) DO(call_impl) DO(before) DO(values_of) DO(value) DO(came) DO(fault) DO(calls_full) DO(values_full)  \
    DO(acquire) DO(release) DO(owner) DO(clock) DO(busy) DO(outer_passes) DO(global_tables) DO(arounds) DO(stacks) DO(notices) DO(resting) DO(stack) DO(calls) DO(values) DO(measured)

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
    self->due_step = -1;
    for (int i = 0; i < SHAPES; i++) self->shapes[i].lineage = -1;
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
    Py_CLEAR(self->stacks);
    Py_CLEAR(self->resting);
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
    int same_calls = self->calls && ((Table *)self->calls)->lineage == ((Table *)calls)->lineage;
    int same_values = self->values && ((Table *)self->values)->lineage == ((Table *)values)->lineage;
    put(&self->calls, calls);
    put(&self->values, values);
    put(&self->measured, measured);
    self->serial++;
    for (int i = 0; i < WORDS && !same_calls; i++) self->call_words[i] = -1;
    for (int i = 0; i < WORDS && !same_values; i++) self->value_words[i] = -1;
    for (int i = 0; i < DTYPES_KNOWN && !same_values; i++) self->dtype_words[i] = -1;
    Py_RETURN_NONE;
}

static int any_in(PyObject *containers)
{
    if (!containers) return 1;
    Py_ssize_t count = PyTuple_Size(containers);
    for (Py_ssize_t i = 0; i < count; i++)
        if (PyObject_Size(PyTuple_GetItem(containers, i)) != 0) return 1;
    return 0;
}

static int is_busy(Engine *self) { return any_in(self->busy); }

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

#endif
