/* The native path of a recording: begins and ends the plain calls of modules, and records their outputs and gradients, without
 * a frame of Python. Plain is a call of a watched module inside another one, outside of backward passes and checkpointing, that
 * gives a dense tensor on the host. All else goes to the Python code beside it (tracker.py, capture.py), which defines what is
 * recorded and runs alone where this was not built. CPython's limited API (3.10).
 */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#endif

#include "_calls_taps.h"

typedef struct {
    PyObject_HEAD
    Engine *engine;
    Place *place;
    PyObject *slow, *layer;
} Hook;

static PyTypeObject *Before_Type, *After_Type;

static PyObject *hook_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *engine, *place, *slow, *layer;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!O!OO", Engine_Type, &engine, Place_Type, &place, &slow, &layer)) return NULL;
    Hook *self = (Hook *)allocate(type);
    if (!self) return NULL;
    put((PyObject **)&self->engine, engine);
    put((PyObject **)&self->place, place);
    put(&self->slow, slow);
    put(&self->layer, layer);
    return (PyObject *)self;
}

static int hook_traverse(PyObject *object, visitproc visit, void *arg)
{
    Hook *self = (Hook *)object;
    Py_VISIT(self->engine);
    Py_VISIT(self->place);
    Py_VISIT(self->slow);
    Py_VISIT(self->layer);
    Py_VISIT(Py_TYPE(object));
    return 0;
}

static int hook_clear(PyObject *object)
{
    Hook *self = (Hook *)object;
    Py_CLEAR(self->engine);
    Py_CLEAR(self->place);
    Py_CLEAR(self->slow);
    Py_CLEAR(self->layer);
    return 0;
}

static void hook_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    hook_clear(object);
    release_object(object);
}

/* Returns the innermost running call where this thread's calls take the native path and nothing unusual is going on. */
static Call *running_call(Engine *self)
{
    if (self->closed || !self->plain || !self->stack || self->ident != PyThread_get_thread_ident() || is_busy(self)) return NULL;
    Py_ssize_t depth = PyList_Size(self->stack);
    if (depth < 1) return NULL;
    PyObject *top = PyList_GetItem(self->stack, depth - 1);
    return Py_TYPE(top) == Call_Type ? (Call *)top : NULL;
}

/* Begins a call: 1, 0 where Python has to, -1 with an exception set. */
static int open_call(Engine *self, Place *place, PyObject *module, PyObject *args, PyObject *kwargs)
{
    Call *outer = running_call(self);
    if (!outer || !place->outer || place->outer != outer->watched) return 0;
    long long token = running_task(self);
    if (token != -1) return token == -2 && PyErr_Occurred() ? -1 : 0;
    int tracks = asks(self->grads_on);
    if (tracks < 0) return -1;
    if (tracks) {
        PyObject *saved = PyObject_CallFunctionObjArgs(self->saved_hooks, Py_False, NULL);
        if (!saved) return -1;
        Py_DECREF(saved);
        if (saved != Py_None) return 0;
    } else if (outer->tracks || (outer->regions != no_regions && PyObject_Size(outer->regions) != 0)) return 0;
    Call *parent = outer->recorded ? outer : (Call *)outer->parent;
    long long seq = self->seq++;
    Call *call = call_make((PyObject *)place, (PyObject *)parent, seq, outer->step, self->thread, now_ns(self));
    if (!call) return -1;
    call->tracks = (char)tracks;
    int failed = place_begin(place, call) || PyList_Append(self->stack, (PyObject *)call);
    if (!failed && place->wanted && place->due && self->follows) {
        call->followed = call->recorded = 1;
        if (self->wants_input) {
            PyObject *done = PyObject_CallFunctionObjArgs(self->before, call, module, args, kwargs, NULL);
            failed = !done;
            Py_XDECREF(done);
        }
    }
    if (!failed && seq % SAMPLED == 0) self->hook_ns += (now_ns(self) - call->start_ns) * SAMPLED;
    Py_DECREF(call);
    return failed ? -1 : 1;
}

static PyObject *before_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    Hook *self = (Hook *)object;
    if (PyTuple_Size(args) == 3 && !kwargs) {
        int done = open_call(self->engine, self->place, PyTuple_GetItem(args, 0), PyTuple_GetItem(args, 1), PyTuple_GetItem(args, 2));
        if (done > 0) Py_RETURN_NONE;
        if (done < 0) return our_fault(self->engine);
    }
    return PyObject_Call(self->slow, args, kwargs);
}

/* Whether an exception is being handled: torch calls some hooks also after a call that has raised. */
static int in_handler(void)
{
    PyObject *kind, *error, *traceback;
    PyErr_GetExcInfo(&kind, &error, &traceback);
    int is = error && error != Py_None;
    Py_XDECREF(kind);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    return is;
}

/* Records what a call has given. 0, or -1 with an exception set. */
static int output_given(Engine *self, Call *call, PyObject *module, PyObject *output)
{
    DLTensor found;
    int dtype, done = ((Place *)call->watched)->keep ? 0 : is_plain(self, output, &found, &dtype);
    if (done > 0 && self->wants_output && add_value(self, call, &found, dtype, 0) < 0) return -1;
    PyObject *rest = NULL;
    if (done > 0 && self->wants_grad_output) {
        done = tap_output(self, call, output, module);
        if (!done) { /* the gradient only */
            rest = PyObject_CallFunctionObjArgs(self->values_of, call, module, output, Py_False, NULL);
            done = rest ? 1 : -1;
        }
    } else if (!done) {
        rest = PyObject_CallFunctionObjArgs(self->values_of, call, module, output, Py_True, NULL);
        done = rest ? 1 : -1;
    }
    Py_XDECREF(rest);
    return done < 0 ? -1 : 0;
}

static int is_given(PyObject *object) { return object && object != Py_None; }

/* Ends a call: 1, 0 where Python has to, -1 with an exception set. */
static int close_call(Engine *self, Place *place, PyObject *module, PyObject *output)
{
    Call *call = running_call(self);
    Py_ssize_t depth = call ? PyList_Size(self->stack) : 0;
    if (depth < 2 || call->watched != (PyObject *)place || call->phase != word_forward || is_given(call->aliases)) return 0;
    if (call->regions != no_regions && PyObject_Size(call->regions) != 0) return 0;
    if (in_handler()) return 0;
    Py_INCREF(call);
    int failed = PyList_SetSlice(self->stack, depth - 1, depth, NULL);
    if (!failed && call->followed) {
        long long now = now_ns(self);
        Call *parent = (Call *)call->parent;
        failed = call->recorded && add_call(self, call, parent, call->start_ns, now - call->start_ns);
        if (!failed && (self->wants_output || self->wants_grad_output)) failed = output_given(self, call, module, output);
        if (!failed && call->seq % SAMPLED == 0) self->hook_ns += (now_ns(self) - now) * SAMPLED;
    }
    Py_DECREF(call);
    return failed ? -1 : 1;
}

static PyObject *after_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    Hook *self = (Hook *)object;
    if (PyTuple_Size(args) == 4 && !kwargs) {
        int done = close_call(self->engine, self->place, PyTuple_GetItem(args, 0), PyTuple_GetItem(args, 3));
        if (done > 0) Py_RETURN_NONE;
        if (done < 0) return our_fault(self->engine);
    }
    return PyObject_Call(self->slow, args, kwargs);
}

static PyMethodDef hook_methods[] = {
    {"__deepcopy__", hook_copy, METH_O, NULL},
    {"__reduce__", hook_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef hook_members[] = {
    {"layer", T_OBJECT, offsetof(Hook, layer), READONLY, "where it stands among hooks of ours"},
    {"slow", T_OBJECT, offsetof(Hook, slow), READONLY, "the hook in Python that does the same"},
    {NULL, 0, 0, 0, NULL},
};

#define HOOK_SLOTS(call)                                                                                                  \
    {Py_tp_new, hook_new}, {Py_tp_dealloc, hook_dealloc}, {Py_tp_traverse, hook_traverse}, {Py_tp_clear, hook_clear},     \
        {Py_tp_call, call}, {Py_tp_methods, hook_methods}, {Py_tp_members, hook_members},                                 \
        {Py_tp_doc, "(engine, place, slow, layer): a hook in a module's table."}, {0, NULL}

static PyType_Slot before_slots[] = {HOOK_SLOTS(before_call)};
static PyType_Slot after_slots[] = {HOOK_SLOTS(after_call)};
static PyType_Spec before_spec = {.name = "tenterhook._calls.Before",
                                  .basicsize = sizeof(Hook),
                                  .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                  .slots = before_slots};
static PyType_Spec after_spec = {.name = "tenterhook._calls.After",
                                 .basicsize = sizeof(Hook),
                                 .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                 .slots = after_slots};

static PyObject *set_outer(PyObject *module, PyObject *args)
{
    PyObject *place, *outer;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!", Place_Type, &place, Place_Type, &outer)) return NULL;
    put(&((Place *)place)->outer, outer);
    Py_RETURN_NONE;
}

static PyObject *connect(PyObject *module, PyObject *args)
{
    PyObject *capsule, *function, *parts;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOO!", &capsule, &function, &PyTuple_Type, &parts)) return NULL;
    kernel = PyCapsule_GetPointer(capsule, KERNEL_API_NAME);
    if (!kernel) return NULL;
    put(&inert, function);
    put(&inert_parts, parts);
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"set_outer", set_outer, METH_VARARGS, "set_outer(place, outer): calls of the one inside the other are nothing unusual."},
    {"connect", connect, METH_VARARGS, "connect(kernel api, inert function, how a pickle makes it): to be called once, first."},
    {NULL, NULL, 0, NULL},
};

static int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **type, const char *name)
{
    *type = (PyTypeObject *)PyType_FromSpec(spec);
    return !*type || PyModule_AddObjectRef(module, name, (PyObject *)*type);
}

static int module_exec(PyObject *module)
{
    word_forward = PyUnicode_InternFromString("forward");
    word_backward = PyUnicode_InternFromString("backward");
    no_regions = PyTuple_New(0);
    name_hooks = PyUnicode_InternFromString("_backward_hooks");
    name_grad_fn = PyUnicode_InternFromString("grad_fn");
    name_requires_grad = PyUnicode_InternFromString("requires_grad");
    name_register = PyUnicode_InternFromString("_register_hook_dict");
    port_key = PyLong_FromLong(-1); /* handles of torch count up from 0 */
    if (!word_forward || !word_backward || !no_regions || !name_hooks || !name_grad_fn || !name_requires_grad || !name_register
        || !port_key)
        return -1;
    return add_type(module, &table_spec, &Table_Type, "Table") || add_type(module, &place_spec, &Place_Type, "Place")
                   || add_type(module, &call_spec, &Call_Type, "LiveCall")
                   || add_type(module, &engine_spec, &Engine_Type, "Engine")
                   || add_type(module, &port_spec, &Port_Type, "Port")
                   || add_type(module, &call_tap_spec, &CallTap_Type, "CallTap")
                   || add_type(module, &before_spec, &Before_Type, "Before")
                   || add_type(module, &after_spec, &After_Type, "After")
               ? -1
               : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "tenterhook._calls",
    .m_doc = "The plain calls of modules, recorded without a frame of Python.",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__calls(void) { return PyModuleDef_Init(&module_definition); }
