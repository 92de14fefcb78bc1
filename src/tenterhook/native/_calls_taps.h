/* Gradients on the native path: the one hook of ours on a tensor, and what it calls for an output that we watch. */
#ifndef TENTERHOOK_CALLS_TAPS_H
#define TENTERHOOK_CALLS_TAPS_H

#include "_calls_rows.h"

static PyTypeObject *Port_Type, *CallTap_Type;
static PyObject *inert; /* a function that takes anything and returns None: what copies and pickles carry for a hook of ours */

typedef struct {
    PyObject_HEAD
    PyObject *taps, *handle, *weak;
} Port;

typedef struct {
    PyObject_HEAD
    Engine *engine;
    Call *call;
    unsigned long long module;
} CallTap;

/* --- one call's output ------------------------------------------------------------------------------------------------ */
static int call_tap_traverse(PyObject *object, visitproc visit, void *arg)
{
    CallTap *self = (CallTap *)object;
    Py_VISIT(self->engine);
    Py_VISIT(self->call);
    Py_VISIT(Py_TYPE(object));
    return 0;
}

static int call_tap_clear(PyObject *object)
{
    CallTap *self = (CallTap *)object;
    Py_CLEAR(self->engine);
    Py_CLEAR(self->call);
    return 0;
}

static void call_tap_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    call_tap_clear(object);
    release_object(object);
}

static int begin_backward(Engine *self, Call *call, long long token, long long now)
{
    call->token = token;
    call->pass_number++;
    call->backward_seq = self->seq++;
    Call *parent = (Call *)call->parent;
    while (parent && (PyObject *)parent != Py_None && parent->token != token) parent = (Call *)parent->parent;
    if ((PyObject *)parent == Py_None) parent = NULL;
    call->backward_depth = parent ? parent->backward_depth + 1 : 0;
    return add_call(self, call, parent, now, -1);
}

/* The gradient of an output has come. Returns what the hook returns. */
static PyObject *gradient_came(CallTap *tap, PyObject *gradient)
{
    Engine *self = tap->engine;
    Call *call = tap->call;
    if (self->closed) Py_RETURN_NONE;
    long long now = now_ns(self), seq = -1;
    long long token = running_task(self);
    int native = token >= 0 && token == self->pass_token && call->output_pending && self->ident == PyThread_get_thread_ident()
                 && (!self->outer_passes || PyDict_Size(self->outer_passes) == 0)
                 && !(call->pending && PyDict_Size(call->pending)) && (!call->forward || call->forward == Py_None);
    if (!native) {
        if (PyErr_Occurred()) return our_fault(self);
        return tell(self->came, Py_BuildValue("(OssOO)", call, "grad_output", "", Py_None, gradient));
    }
    if (call->token != token && begin_backward(self, call, token, now)) return our_fault(self);
    if (self->closed) Py_RETURN_NONE; /* by another thread meanwhile */
    ((Place *)call->watched)->gradient_count++;
    call->output_token = token;
    DLTensor found;
    int dtype, plain = ((Place *)call->watched)->keep || !self->plain ? 0 : is_plain(self, gradient, &found, &dtype);
    Subject of = {.call = call, .backward = 1};
    if (plain > 0) seq = add_value(self, &of, &found, dtype);
    else if (!plain) {
        PyObject *number = tell(self->value, Py_BuildValue("(OssO)", call, "grad_output", "", gradient));
        seq = !number ? -1 : number == Py_None ? self->seq : PyLong_AsLongLong(number);
        Py_XDECREF(number);
    }
    if (seq < 0) return our_fault(self);
    if (seq % SAMPLED == 0) self->hook_ns += (now_ns(self) - now) * SAMPLED;
    Py_RETURN_NONE;
}

static PyObject *call_tap_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    PyObject *gradient;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O", &gradient)) return NULL;
    return gradient_came((CallTap *)object, gradient);
}

static PyObject *call_tap_itself(PyObject *object, void *closure)
{
    (void)closure;
    Py_INCREF(object);
    return object;
}

static PyObject *call_tap_owner(PyObject *object, void *closure)
{
    PyObject *owner = ((CallTap *)object)->engine->owner;
    (void)closure;
    owner = owner ? owner : Py_None;
    Py_INCREF(owner);
    return owner;
}

static PyObject *constant_true(PyObject *object, void *closure)
{
    (void)object, (void)closure;
    Py_RETURN_TRUE;
}

static PyObject *constant_false(PyObject *object, void *closure)
{
    (void)object, (void)closure;
    Py_RETURN_FALSE;
}

static PyMemberDef call_tap_members[] = {
    {"module", T_ULONGLONG, offsetof(CallTap, module), READONLY, "id of the module whose output it is"},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef call_tap_getset[] = {
    {"fn", call_tap_itself, NULL, "what takes the gradient", NULL},
    {"owner", call_tap_owner, NULL, "whose tap it is", NULL},
    {"live", constant_true, NULL, "always", NULL},
    {"edits", constant_false, NULL, "never", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot call_tap_slots[] = {
    {Py_tp_dealloc, call_tap_dealloc}, {Py_tp_traverse, call_tap_traverse}, {Py_tp_clear, call_tap_clear},
    {Py_tp_call, call_tap_call},       {Py_tp_getset, call_tap_getset},     {Py_tp_members, call_tap_members},
    {0, NULL},
};

static PyType_Spec call_tap_spec = {.name = "tenterhook.native._calls.CallTap",
                                    .basicsize = sizeof(CallTap),
                                    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                    .slots = call_tap_slots};

/* --- the hook on a tensor --------------------------------------------------------------------------------------------- */
static PyObject *port_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    (void)args, (void)kwargs;
    Port *self = (Port *)allocate(type);
    if (!self) return NULL;
    self->taps = PyList_New(0);
    if (!self->taps) Py_CLEAR(self);
    return (PyObject *)self;
}

static int port_traverse(PyObject *object, visitproc visit, void *arg)
{
    Port *self = (Port *)object;
    Py_VISIT(self->taps);
    Py_VISIT(self->handle);
    Py_VISIT(Py_TYPE(object));
    return 0;
}

static int port_clear(PyObject *object)
{
    Port *self = (Port *)object;
    Py_CLEAR(self->taps);
    Py_CLEAR(self->handle);
    return 0;
}

static void port_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    if (((Port *)object)->weak) PyObject_ClearWeakRefs(object);
    port_clear(object);
    release_object(object);
}

/* Runs one tap: a new reference to what it gives, None where that is nothing. */
static PyObject *run_tap(PyObject *tap, PyObject *gradient)
{
    if (Py_TYPE(tap) == CallTap_Type) return gradient_came((CallTap *)tap, gradient);
    PyObject *live = PyObject_GetAttrString(tap, "live");
    if (!live || live != Py_True) return live && live == Py_False ? (Py_INCREF(Py_None), Py_DECREF(live), Py_None) : (Py_XDECREF(live), NULL);
    Py_DECREF(live);
    PyObject *fn = PyObject_GetAttrString(tap, "run");
    if (!fn) return NULL;
    PyObject *new = PyObject_CallFunctionObjArgs(fn, gradient, NULL);
    Py_DECREF(fn);
    return new;
}

/* Runs the taps, the last module to have finished first. */
static PyObject *port_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    Port *self = (Port *)object;
    PyObject *gradient;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O", &gradient)) return NULL;
    if (gradient == Py_None) Py_RETURN_NONE; /* torch's own backward hooks hand on None for outputs that were not used */
    PyObject *taps = PyList_AsTuple(self->taps), *replaced = NULL;
    if (!taps) return NULL;
    for (Py_ssize_t i = PyTuple_Size(taps) - 1; i >= 0; i--) {
        PyObject *new = run_tap(PyTuple_GetItem(taps, i), replaced ? replaced : gradient);
        if (!new) {
            Py_DECREF(taps);
            Py_XDECREF(replaced);
            return NULL;
        }
        if (new != Py_None) {
            Py_XDECREF(replaced);
            replaced = new;
        } else Py_DECREF(new);
    }
    Py_DECREF(taps);
    if (replaced) return replaced;
    Py_RETURN_NONE;
}

static PyObject *port_ref(PyObject *object, void *closure)
{
    (void)closure;
    return PyWeakref_NewRef(object, NULL);
}

static PyObject *hook_copy(PyObject *object, PyObject *memo)
{
    (void)object, (void)memo;
    Py_INCREF(inert);
    return inert;
}

static PyObject *inert_parts; /* how a pickle makes it: works where tenterhook is not installed */

static PyObject *hook_reduce(PyObject *object, PyObject *ignored)
{
    (void)object, (void)ignored;
    Py_INCREF(inert_parts);
    return inert_parts;
}

static PyMethodDef port_methods[] = {
    {"__deepcopy__", hook_copy, METH_O, NULL},
    {"__reduce__", hook_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef port_members[] = {
    {"taps", T_OBJECT_EX, offsetof(Port, taps), READONLY, "run from the end"},
    {"handle", T_OBJECT, offsetof(Port, handle), 0, "takes it off; None where it stays as long as the graph"},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Port, weak), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef port_getset[] = {
    {"ref", port_ref, NULL, "weak reference to it", NULL},
    {"__torch_unserializable__", constant_true, NULL, "tensors are pickled without it, and without torch's warning", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot port_slots[] = {
    {Py_tp_new, port_new},         {Py_tp_dealloc, port_dealloc}, {Py_tp_traverse, port_traverse}, {Py_tp_clear, port_clear},
    {Py_tp_call, port_call},       {Py_tp_methods, port_methods}, {Py_tp_members, port_members},   {Py_tp_getset, port_getset},
    {Py_tp_doc, "Port(): the one hook that we keep on a tensor; runs its taps, the last module to have finished first."},
    {0, NULL},
};

static PyType_Spec port_spec = {.name = "tenterhook.native._calls.Port",
                                .basicsize = sizeof(Port),
                                .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                .slots = port_slots};

/* --- putting it on ---------------------------------------------------------------------------------------------------- */
static PyObject *new_tap(Engine *self, Call *call, PyObject *module)
{
    CallTap *tap = (CallTap *)allocate(CallTap_Type);
    if (!tap) return NULL;
    Py_INCREF(self);
    tap->engine = self;
    Py_INCREF(call);
    tap->call = call;
    tap->module = (unsigned long long)(uintptr_t)module; /* its id */
    return (PyObject *)tap;
}

/* Adds to the taps that are on a tensor: 1, 0 where Python has to find the place, -1. */
static int join_taps(Engine *self, Call *call, PyObject *hooks, PyObject *module)
{
    PyObject *key, *hook, *port = NULL;
    Py_ssize_t at = 0;
    if (!PyDict_Check(hooks)) return 0;
    while (!port && PyDict_Next(hooks, &at, &key, &hook))
        if (Py_TYPE(hook) == Port_Type) port = hook;
    if (!port) return 0;
    PyObject *taps = ((Port *)port)->taps;
    Py_ssize_t count = PyList_Size(taps);
    if (count) {
        PyObject *last = PyList_GetItem(taps, count - 1);
        if (Py_TYPE(last) != CallTap_Type) return 0;
        CallTap *before = (CallTap *)last; /* those of one module's one call stand together, first come first run */
        if (before->module == (unsigned long long)(uintptr_t)module && before->engine != self) return 0;
    }
    Py_INCREF(taps);
    PyObject *tap = new_tap(self, call, module);
    int failed = !tap || PyList_Append(taps, tap);
    Py_XDECREF(tap);
    Py_DECREF(taps);
    return failed ? -1 : 1;
}

static int put_port_on(Engine *self, Call *call, PyObject *tensor, PyObject *grad_fn, PyObject *module)
{
    int failed = 1;
    PyObject *port = port_new(Port_Type, NULL, NULL), *tap = new_tap(self, call, module), *done = NULL;
    PyObject *hooks = PyObject_CallNoArgs(self->new_hooks);
    if (port && tap && hooks && !PyList_Append(((Port *)port)->taps, tap) && !PyObject_SetItem(hooks, port_key, port)
        && !PyObject_SetAttr(tensor, name_hooks, hooks)) {
        done = PyObject_CallMethodObjArgs(grad_fn, name_register, tensor, NULL);
        failed = !done;
    }
    Py_XDECREF(done);
    Py_XDECREF(port);
    Py_XDECREF(tap);
    Py_XDECREF(hooks);
    return failed ? -1 : 1;
}

static int count_reason(Engine *self, Place *place)
{
    int on = asks(self->grads_on);
    if (on < 0) return -1;
    int inference = on ? 0 : asks(self->inference_on);
    if (inference < 0) return -1;
    PyObject *reason = PyUnicode_InternFromString(on ? "requires_grad=False" : inference ? "inference mode" : "grad mode off");
    PyObject *known = reason ? PyDict_GetItemWithError(place->no_gradient, reason) : NULL;
    PyObject *count = !reason || PyErr_Occurred() ? NULL : PyLong_FromLongLong(known ? PyLong_AsLongLong(known) + 1 : 1);
    int failed = !count || PyDict_SetItem(place->no_gradient, reason, count);
    Py_XDECREF(reason);
    Py_XDECREF(count);
    return failed ? -1 : 1;
}

/* Waits for the gradient of a plain tensor: 1 where that is seen to, 0 where Python has to, -1 with an exception set. */
static int tap_output(Engine *self, Call *call, PyObject *tensor, PyObject *module)
{
    PyObject *wants = PyObject_GetAttr(tensor, name_requires_grad);
    if (!wants) return -1;
    Py_DECREF(wants);
    if (wants != Py_True) return count_reason(self, (Place *)call->watched);
    int outside = asks(self->forward_ad_on); /* of a function of the user's own, which gives its outputs another node */
    if (outside <= 0) return outside;
    PyObject *view = PyObject_CallFunctionObjArgs(self->is_view, tensor, NULL);
    if (!view) return -1;
    Py_DECREF(view);
    if (view != Py_False) return 0;
    PyObject *grad_fn = PyObject_GetAttr(tensor, name_grad_fn);
    if (!grad_fn) return -1;
    PyObject *hooks = grad_fn == Py_None ? NULL : PyObject_GetAttr(tensor, name_hooks);
    int done = -1;
    if (grad_fn == Py_None) done = 0; /* a leaf: its hooks outlive the graph */
    else if (hooks) done = hooks == Py_None ? put_port_on(self, call, tensor, grad_fn, module) : join_taps(self, call, hooks, module);
    Py_XDECREF(hooks);
    Py_DECREF(grad_fn);
    if (done > 0) {
        call->output_pending = 1;
        call->output_token = -1;
    }
    return done;
}

#endif
