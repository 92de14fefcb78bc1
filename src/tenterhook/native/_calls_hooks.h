/* Our hooks in a module's tables. */
#ifndef TENTERHOOK_CALLS_HOOKS_H
#define TENTERHOOK_CALLS_HOOKS_H

#include "_calls_plain.h"

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

static PyObject *before_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    Hook *self = (Hook *)object;
    self->engine->unsure = 1;
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

static PyObject *after_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    Hook *self = (Hook *)object;
    if (PyTuple_Size(args) == 4 && !kwargs && !in_handler()) {
        int done = close_call(self->engine, self->place, PyTuple_GetItem(args, 0), PyTuple_GetItem(args, 3));
        if (done > 0) Py_RETURN_NONE;
        if (done < 0) return our_fault(self->engine);
    }
    PyObject *done = PyObject_Call(self->slow, args, kwargs);
    if (!done && PyErr_ExceptionMatches(PyExc_RecursionError) && in_handler()) {
        /* The user's own recursion has used up the stack. A call around this one, where there is room again, finds that it never ended. */
        PyErr_Clear();
        ((Engine *)self->engine)->unsure = 1;
        Py_RETURN_NONE;
    }
    return done;
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
static PyType_Spec before_spec = {.name = "tenterhook.native._calls.Before",
                                  .basicsize = sizeof(Hook),
                                  .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                  .slots = before_slots};
static PyType_Spec after_spec = {.name = "tenterhook.native._calls.After",
                                 .basicsize = sizeof(Hook),
                                 .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                 .slots = after_slots};

#endif
