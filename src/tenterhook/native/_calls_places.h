/* What the native call path shares with Python: places (watched modules) and their calls. */
#ifndef TENTERHOOK_CALLS_PLACES_H
#define TENTERHOOK_CALLS_PLACES_H

#include "_calls_tables.h"

static PyTypeObject *Place_Type, *Call_Type;
static PyObject *word_forward, *word_backward, *no_regions;

/* --- places: what is counted of a watched module -------------------------------------------------------------------- */
#define MOST_REPEATED 64
#define CACHED_DIMS 6
enum { SITE_CALL, SITE_OUTPUT, SITE_GRADIENT, SITES };

typedef struct {
    long long lineage; /* of the tables that it is known in */
    int64_t code;
    int dims;
    int64_t sizes[CACHED_DIMS];
} Known;

typedef struct {
    PyObject_HEAD
    PyObject *model, *outer, *numbers, *step_calls, *no_gradient;
    PyObject *attachment, *resting; /* the hooks of Python's; the same while they are off and will come back */
    PyObject *around;               /* what the attachment has put around the module's calls, if it has */
    long long call_count, recorded_count, gradient_count, step, recomputed;
    long long thread, thread_step, thread_next; /* the newest entry of `numbers` */
    char wanted, due, keep;
    Known sites[SITES], shapes[SITES];
} Place;

typedef struct {
    PyObject_HEAD
    PyObject *watched, *parent, *forward, *regions, *source, *around, *ops, *aliases, *pending, *phase;
    long long seq, step, thread, start_ns, number, depth, token, pass_number, backward_seq, backward_depth;
    long long output_token; /* of the one gradient that the native path waits for: what `pending` says of others */
    char output_pending, followed, recorded, tracks;
} Call;

static PyObject *place_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    (void)args, (void)kwargs;
    Place *self = (Place *)allocate(type);
    if (!self) return NULL;
    self->step = self->thread = -1;
    self->due = 1;
    for (int i = 0; i < SITES; i++) self->sites[i].lineage = self->shapes[i].lineage = -1;
    self->numbers = PyDict_New();
    self->step_calls = PyList_New(0);
    if (!self->numbers || !self->step_calls) Py_CLEAR(self);
    return (PyObject *)self;
}

#define EACH_OBJECT_OF_A_PLACE(DO) \
    DO(model) DO(outer) DO(numbers) DO(step_calls) DO(no_gradient) DO(attachment) DO(resting) DO(around)

static int place_traverse(PyObject *object, visitproc visit, void *arg)
{
    Place *self = (Place *)object;
#define DO(name) Py_VISIT(self->name);
    EACH_OBJECT_OF_A_PLACE(DO)
#undef DO
    Py_VISIT(Py_TYPE(object)); /* of subclasses, too: theirs leaves it to us */
    return 0;
}

static int place_clear(PyObject *object)
{
    Place *self = (Place *)object;
#define DO(name) Py_CLEAR(self->name);
    EACH_OBJECT_OF_A_PLACE(DO)
#undef DO
    return 0;
}

static void place_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    place_clear(object);
    release_object(object);
}

/* Puts the newest entry among the others. */
static int place_settle(Place *self)
{
    if (self->thread < 0) return 0;
    PyObject *thread = PyLong_FromLongLong(self->thread);
    PyObject *entry = Py_BuildValue("LL", self->thread_step, self->thread_next);
    int failed = !thread || !entry || PyDict_SetItem(self->numbers, thread, entry);
    Py_XDECREF(thread);
    Py_XDECREF(entry);
    return failed;
}

static int place_take_up(Place *self, long long thread, long long step)
{
    if (place_settle(self)) return -1;
    self->thread = -1;
    PyObject *known = PyDict_Copy(self->numbers), *key, *value;
    if (!known) return -1;
    Py_ssize_t at = 0;
    long long found_step = step, found_next = 0;
    int failed = 0;
    while (!failed && PyDict_Next(known, &at, &key, &value)) {
        long long entry_step = PyLong_AsLongLong(PyTuple_GetItem(value, 0));
        if (PyLong_AsLongLong(key) == thread) {
            found_step = entry_step;
            found_next = PyLong_AsLongLong(PyTuple_GetItem(value, 1));
            failed = PyDict_DelItem(self->numbers, key);
        } else if (entry_step < step) failed = PyDict_DelItem(self->numbers, key); /* threads come and go */
    }
    Py_DECREF(known);
    if (failed) return -1;
    self->thread = thread;
    self->thread_step = found_step;
    self->thread_next = found_next;
    return 0;
}

/* Returns the number of this thread's next call in a step; -1 with an exception set. */
static long long place_number(Place *self, long long thread, long long step)
{
    if (self->thread != thread && place_take_up(self, thread, step)) return -1;
    if (self->thread_step != step) {
        self->thread_step = step;
        self->thread_next = 0;
    }
    return self->thread_next++;
}

static int place_begin(Place *self, Call *call)
{
    if (self->step != call->step) {
        self->step = call->step;
        self->recomputed = 0;
        PyObject *calls = PyList_New(0);
        if (!calls) return -1;
        PyObject *old = self->step_calls;
        self->step_calls = calls;
        Py_XDECREF(old);
    }
    call->number = place_number(self, call->thread, call->step);
    if (call->number < 0) return -1;
    self->call_count++;
    self->recorded_count += self->wanted && self->due;
    if (call->regions && call->regions != no_regions && PyObject_Size(call->regions) != 0) return 0;
    if (PyList_Append(self->step_calls, (PyObject *)call)) return -1;
    return PyList_Size(self->step_calls) > MOST_REPEATED ? PyList_SetSlice(self->step_calls, 0, 1, NULL) : 0;
}

static PyObject *place_begin_call(PyObject *object, PyObject *call)
{
    if (Py_TYPE(call) != Call_Type) return PyErr_Format(PyExc_TypeError, "begin_call needs a LiveCall");
    if (place_begin((Place *)object, (Call *)call)) return NULL;
    Py_RETURN_NONE;
}

static PyObject *place_next_number(PyObject *object, PyObject *args)
{
    long long thread, step;
    if (!PyArg_ParseTuple(args, "LL", &thread, &step)) return NULL;
    long long number = place_number((Place *)object, thread, step);
    return number < 0 ? NULL : PyLong_FromLongLong(number);
}

static PyObject *place_get_numbers(PyObject *object, void *closure)
{
    Place *self = (Place *)object;
    (void)closure;
    if (place_settle(self)) return NULL;
    return PyDict_Copy(self->numbers);
}

static int place_set_numbers(PyObject *object, PyObject *value, void *closure)
{
    Place *self = (Place *)object;
    (void)closure;
    PyObject *copy = value ? PyDict_Copy(value) : PyDict_New();
    if (!copy) return -1;
    self->thread = -1;
    Py_XDECREF(self->numbers);
    self->numbers = copy;
    return 0;
}

static PyObject *place_get_model(PyObject *object, void *closure)
{
    PyObject *model = ((Place *)object)->model;
    (void)closure;
    model = model ? model : Py_None;
    Py_INCREF(model);
    return model;
}

static int place_set_model(PyObject *object, PyObject *value, void *closure)
{
    Place *self = (Place *)object;
    (void)closure;
    put(&self->model, value);
    for (int i = 0; i < SITES; i++) self->sites[i].lineage = -1; /* they bear the model's name */
    return 0;
}

static PyMethodDef place_methods[] = {
    {"begin_call", place_begin_call, METH_O, "begin_call(call): number a call, and count it."},
    {"next_number", place_next_number, METH_VARARGS, "next_number(thread, step) -> int: the number of a thread's next call."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef place_getset[] = {
    {"numbers", place_get_numbers, place_set_numbers, "thread -> (step, calls so far in it); a copy", NULL},
    {"model", place_get_model, place_set_model, "name of the model", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef place_members[] = {
    {"step_calls", T_OBJECT_EX, offsetof(Place, step_calls), 0, "calls of the step"},
    {"no_gradient", T_OBJECT_EX, offsetof(Place, no_gradient), 0, "why no gradient could come -> how often"},
    {"attachment", T_OBJECT, offsetof(Place, attachment), 0, "its hooks"},
    {"resting", T_OBJECT, offsetof(Place, resting), 0, "its hooks, while they are off and will come back"},
    {"around", T_OBJECT, offsetof(Place, around), 0, "what stands around the module's calls, where that is the attachment"},
    {"call_count", T_LONGLONG, offsetof(Place, call_count), 0, "calls"},
    {"recorded_count", T_LONGLONG, offsetof(Place, recorded_count), 0, "those of them on steps that are recorded"},
    {"gradient_count", T_LONGLONG, offsetof(Place, gradient_count), 0, "gradients that came"},
    {"step", T_LONGLONG, offsetof(Place, step), 0, "step of its newest call"},
    {"recomputed", T_LONGLONG, offsetof(Place, recomputed), 0, "calls of the step that came again"},
    {"wanted", T_BOOL, offsetof(Place, wanted), 0, "selected for recording"},
    {"due", T_BOOL, offsetof(Place, due), 0, "recorded on this step"},
    {"keep", T_BOOL, offsetof(Place, keep), 0, "its tensors are kept, too"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot place_slots[] = {
    {Py_tp_new, place_new},         {Py_tp_dealloc, place_dealloc}, {Py_tp_traverse, place_traverse},
    {Py_tp_clear, place_clear},     {Py_tp_methods, place_methods}, {Py_tp_getset, place_getset},
    {Py_tp_members, place_members}, {Py_tp_doc, "Place(): what is counted of a watched module."},
    {0, NULL},
};

static PyType_Spec place_spec = {.name = "tenterhook.native._calls.Place",
                                 .basicsize = sizeof(Place),
                                 .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
                                 .slots = place_slots};

/* --- calls ---------------------------------------------------------------------------------------------------------- */
static Call *call_make(PyObject *watched, PyObject *parent, long long seq, long long step, long long thread, long long start)
{
    Call *self = (Call *)allocate(Call_Type);
    if (!self) return NULL;
    Py_INCREF(watched);
    self->watched = watched;
    if (parent && parent != Py_None) {
        Py_INCREF(parent);
        self->parent = parent;
        self->depth = ((Call *)parent)->depth + 1;
    }
    self->seq = seq;
    self->step = step;
    self->thread = thread;
    self->start_ns = start;
    self->token = self->pass_number = self->backward_seq = self->output_token = -1;
    Py_INCREF(word_forward);
    self->phase = word_forward;
    Py_INCREF(no_regions);
    self->regions = no_regions;
    return self;
}

static PyObject *call_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *watched, *parent;
    long long seq, step, thread, start;
    (void)type, (void)kwargs;
    if (!PyArg_ParseTuple(args, "OOLLLL", &watched, &parent, &seq, &step, &thread, &start)) return NULL;
    if (!PyObject_TypeCheck(watched, Place_Type)) return PyErr_Format(PyExc_TypeError, "watched must be a Place");
    if (parent != Py_None && Py_TYPE(parent) != Call_Type) return PyErr_Format(PyExc_TypeError, "parent must be a LiveCall");
    return (PyObject *)call_make(watched, parent, seq, step, thread, start);
}

#define EACH_OBJECT_OF_A_CALL(DO) \
    DO(watched) DO(parent) DO(forward) DO(regions) DO(source) DO(around) DO(ops) DO(aliases) DO(pending) DO(phase)

static int call_traverse(PyObject *object, visitproc visit, void *arg)
{
    Call *self = (Call *)object;
#define DO(name) Py_VISIT(self->name);
    EACH_OBJECT_OF_A_CALL(DO)
#undef DO
    Py_VISIT(Py_TYPE(object));
    return 0;
}

static int call_clear(PyObject *object)
{
    Call *self = (Call *)object;
#define DO(name) Py_CLEAR(self->name);
    EACH_OBJECT_OF_A_CALL(DO)
#undef DO
    return 0;
}

static void call_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    call_clear(object);
    release_object(object);
}

static PyObject *output_key(void)
{
    static PyObject *key;
    if (!key) key = Py_BuildValue("ss", "grad_output", "");
    return key;
}

static PyObject *call_pending(PyObject *object, void *closure)
{
    Call *self = (Call *)object;
    (void)closure;
    PyObject *found = self->pending ? PyDict_Copy(self->pending) : PyDict_New();
    if (found && self->output_pending) {
        PyObject *token = PyLong_FromLongLong(self->output_token);
        if (!token || PyDict_SetItem(found, output_key(), token)) Py_CLEAR(found);
        Py_XDECREF(token);
    }
    return found;
}

static PyObject *call_expect(PyObject *object, PyObject *args)
{
    Call *self = (Call *)object;
    PyObject *kind, *slot;
    long long token = -1;
    if (!PyArg_ParseTuple(args, "OO|L", &kind, &slot, &token)) return NULL;
    PyObject *key = PyTuple_Pack(2, kind, slot), *value = PyLong_FromLongLong(token);
    int failed = !key || !value;
    if (!failed && self->output_pending && PyObject_RichCompareBool(key, output_key(), Py_EQ) == 1) self->output_token = token;
    else if (!failed) {
        if (!self->pending) self->pending = PyDict_New();
        failed = !self->pending || PyDict_SetItem(self->pending, key, value);
    }
    Py_XDECREF(key);
    Py_XDECREF(value);
    if (failed) return NULL;
    return PyLong_FromSsize_t((self->pending ? PyDict_Size(self->pending) : 0) + self->output_pending);
}

static PyObject *call_expects_gradient(PyObject *object, void *closure)
{
    Call *self = (Call *)object;
    (void)closure;
    if (!self->phase || PyUnicode_CompareWithASCIIString(self->phase, "recompute") != 0) Py_RETURN_TRUE;
    if (!self->forward || self->forward == Py_None) Py_RETURN_FALSE;
    Call *first = (Call *)self->forward;
    return PyBool_FromLong(!first->output_pending && !(first->pending && PyDict_Size(first->pending)));
}

static PyMethodDef call_methods[] = {
    {"expect", call_expect, METH_VARARGS,
     "expect(kind, slot, token=-1) -> int: a gradient is waited for, or has come in a backward pass; returns how many are known."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef call_getset[] = {
    {"pending", call_pending, NULL, "gradients expected -> backward pass that brought them last; a copy", NULL},
    {"expects_gradient", call_expects_gradient, NULL, "whether gradients may come by way of this run of the call", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

#define OBJECT(name) {#name, T_OBJECT, offsetof(Call, name), 0, NULL}
#define NUMBER(name) {#name, T_LONGLONG, offsetof(Call, name), 0, NULL}
#define FLAG(name) {#name, T_BOOL, offsetof(Call, name), 0, NULL}
static PyMemberDef call_members[] = {
    OBJECT(watched), OBJECT(parent), OBJECT(forward), OBJECT(regions), OBJECT(source), OBJECT(around), OBJECT(ops),
    OBJECT(aliases), OBJECT(phase), NUMBER(seq), NUMBER(step), NUMBER(thread), NUMBER(start_ns), NUMBER(number),
    NUMBER(depth), NUMBER(token), NUMBER(pass_number), NUMBER(backward_seq), NUMBER(backward_depth), FLAG(followed),
    FLAG(recorded), FLAG(tracks), {NULL, 0, 0, 0, NULL},
};
#undef OBJECT
#undef NUMBER
#undef FLAG

static PyType_Slot call_slots[] = {
    {Py_tp_new, call_new},         {Py_tp_dealloc, call_dealloc}, {Py_tp_traverse, call_traverse},
    {Py_tp_clear, call_clear},     {Py_tp_methods, call_methods}, {Py_tp_getset, call_getset},
    {Py_tp_members, call_members}, {Py_tp_doc, "LiveCall(watched, parent, seq, step, thread, start_ns): one call of a watched module."},
    {0, NULL},
};

static PyType_Spec call_spec = {.name = "tenterhook.native._calls.LiveCall",
                                .basicsize = sizeof(Call),
                                .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                .slots = call_slots};

#endif
