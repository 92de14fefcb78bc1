/* Calls of a module that has no hooks but ours: torch's own way round its hook tables, `_compiled_call_impl`, leads here. */
#ifndef TENTERHOOK_CALLS_AROUND_H
#define TENTERHOOK_CALLS_AROUND_H

#include "_calls_plain.h"

#define TABLES 4

static PyTypeObject *Around_Type;
static PyObject *name_call_impl, *name_compiled, *name_tables[TABLES];
static Py_ssize_t references_alone = -1; /* of an Around that is being called, where nobody has copied its module's __dict__ */

typedef struct {
    PyObject_HEAD
    Engine *engine; /* NULL in the one by which references are counted */
    Place *place;
    PyObject *ref, *type, *before, *after, *failed, *elsewhere, *give_way;
    char on;
    char replaced; /* for good: hooks have taken its place */
    char yielded; /* hooks stand in its place: they do not run for a call that began before, and ends here */
} Around;

#define EACH_OBJECT_OF_AN_AROUND(DO) DO(engine) DO(place) DO(ref) DO(type) DO(before) DO(after) DO(failed) DO(elsewhere) DO(give_way)

static PyObject *around_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *engine, *place, *module, *before, *after, *failed, *elsewhere;
    (void)kwargs;
    if (PyTuple_Size(args) == 0) return allocate(type);
    if (!PyArg_ParseTuple(args, "O!O!OOOOO", Engine_Type, &engine, Place_Type, &place, &module, &before, &after, &failed, &elsewhere))
        return NULL;
    PyObject *ref = PyWeakref_NewRef(module, NULL);
    Around *self = ref ? (Around *)allocate(type) : NULL;
    if (!self) {
        Py_XDECREF(ref);
        return NULL;
    }
    self->ref = ref;
    put((PyObject **)&self->engine, engine);
    put((PyObject **)&self->place, place);
    put(&self->type, (PyObject *)Py_TYPE(module));
    put(&self->before, before);
    put(&self->after, after);
    put(&self->failed, failed);
    put(&self->elsewhere, elsewhere);
    return (PyObject *)self;
}

static int around_traverse(PyObject *object, visitproc visit, void *arg)
{
    Around *self = (Around *)object;
#define DO(name) Py_VISIT(self->name);
    EACH_OBJECT_OF_AN_AROUND(DO)
#undef DO
    Py_VISIT(Py_TYPE(object));
    return 0;
}

static int around_clear(PyObject *object)
{
    Around *self = (Around *)object;
#define DO(name) Py_CLEAR(self->name);
    EACH_OBJECT_OF_AN_AROUND(DO)
#undef DO
    return 0;
}

static void around_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    around_clear(object);
    release_object(object);
}

static int has_global_hooks(Engine *engine) { return engine->global_tables && any_in(engine->global_tables); }

/* Whether a module of these attributes has hooks of its own; -1 with an exception set. */
static int has_own_hooks(PyObject *attributes)
{
    int has = 0;
    for (int i = 0; i < TABLES && !has; i++) {
        PyObject *table = PyDict_GetItemWithError(attributes, name_tables[i]);
        has = !table || PyObject_Size(table) != 0;
    }
    return PyErr_Occurred() ? -1 : has;
}

/* Whether the module, or every module, has hooks of somebody else's; -1 with an exception set. */
static int has_hooks(Engine *engine, PyObject *module)
{
    if (has_global_hooks(engine)) return 1;
    PyObject *attributes = PyObject_GenericGetDict(module, NULL);
    if (!attributes) return -1;
    int has = has_own_hooks(attributes);
    Py_DECREF(attributes);
    return has;
}

/* Calls a hook in Python with what a module is called with, and with `last` where there is one. */
static PyObject *call_hook(PyObject *hook, PyObject *module, PyObject *args, PyObject *kwargs, PyObject *last)
{
    PyObject *named = kwargs ? (Py_INCREF(kwargs), kwargs) : PyDict_New();
    PyObject *done = named ? PyObject_CallFunctionObjArgs(hook, module, args, named, last, NULL) : NULL;
    Py_XDECREF(named);
    return done;
}

/* The call has raised: records it, and leaves the exception as it is. */
static void call_failed(Around *self, PyObject *module, PyObject *args, PyObject *kwargs)
{
    PyObject *kind, *error, *traceback;
    PyErr_Fetch(&kind, &error, &traceback);
    PyErr_NormalizeException(&kind, &error, &traceback);
    if (traceback) PyException_SetTraceback(error, traceback);
    if (PyErr_GivenExceptionMatches(kind, PyExc_Exception)) {
        PyObject *done = call_hook(self->failed, module, args, kwargs, error);
        if (done) Py_DECREF(done);
        else PyErr_Clear(); /* as torch does: the error of the call wins */
    } else self->engine->unsure = 1; /* as with hooks, the call stays open until Python finds out */
    PyErr_Restore(kind, error, traceback);
}

static PyObject *run_module(PyObject *module, PyObject *args, PyObject *kwargs)
{
    PyObject *run = PyObject_GetAttr(module, name_call_impl);
    PyObject *result = run ? PyObject_Call(run, args, kwargs) : NULL;
    Py_XDECREF(run);
    return result;
}

/* Whether a module's `_call_impl` is the framework's, which does nothing but call `forward` where there are no hooks and nothing
 * is being traced; -1 with an exception set. Of another class than it had nothing is known: that may answer for its attributes. */
static int only_forwards(Around *self, PyObject *module)
{
    Engine *engine = self->engine;
    if (!engine->call_impl || engine->call_impl == Py_None || (PyObject *)Py_TYPE(module) != self->type) return 0;
    PyObject *found = PyObject_GetAttr((PyObject *)Py_TYPE(module), name_call_impl);
    if (!found) return -1;
    Py_DECREF(found);
    if (found != engine->call_impl) return 0;
    PyObject *attributes = PyObject_GenericGetDict(module, NULL);
    found = attributes ? PyDict_GetItemWithError(attributes, name_call_impl) : NULL;
    Py_XDECREF(attributes);
    if (found || PyErr_Occurred()) return found ? 0 : -1;
    PyObject *traced = PyObject_CallNoArgs(engine->tracing);
    if (!traced) return -1;
    Py_DECREF(traced);
    return traced == Py_None;
}

static PyObject *run_forward(PyObject *module, PyObject *args, PyObject *kwargs)
{
    PyObject *forward = PyObject_GetAttr(module, word_forward);
    PyObject *result = forward ? PyObject_Call(forward, args, kwargs) : NULL;
    Py_XDECREF(forward);
    return result;
}

/* Begins a call: 1, 0 where that was for Python to do, -1 with an exception set. */
static int begin_around(Around *self, PyObject *module, PyObject *args, PyObject *kwargs)
{
    int begun = open_call(self->engine, self->place, module, args, kwargs);
    if (begun > 0) return 1;
    PyObject *done = begun == 0 ? call_hook(self->before, module, args, kwargs, NULL) : our_fault(self->engine);
    if (!done) self->engine->unsure = 1; /* the call may be open, and will not end here */
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int end_around(Around *self, PyObject *module, PyObject *args, PyObject *kwargs, PyObject *result)
{
    if (!self->on && !self->yielded) return 0; /* taken off in the meantime */
    int ended = close_call(self->engine, self->place, module, result);
    if (ended > 0) return 0;
    PyObject *done = ended == 0 ? call_hook(self->after, module, args, kwargs, result) : our_fault(self->engine);
    if (!done) self->engine->unsure = 1;
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static PyObject *call_around(Around *self, PyObject *module, PyObject *args, PyObject *kwargs)
{
    int begun = begin_around(self, module, args, kwargs);
    if (begun < 0) return NULL;
    int direct = begun ? only_forwards(self, module) : 0; /* Python may have put hooks on */
    PyObject *result = direct < 0 ? NULL : direct ? run_forward(module, args, kwargs) : run_module(module, args, kwargs);
    if (!result) {
        if (self->on || self->yielded) call_failed(self, module, args, kwargs);
    } else if (end_around(self, module, args, kwargs, result)) Py_CLEAR(result);
    return result;
}

static PyObject *around_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    Around *self = (Around *)object;
    if (!self->engine) {
        references_alone = Py_REFCNT(object);
        Py_RETURN_NONE;
    }
    PyObject *module = PyWeakref_GetObject(self->ref), *result = NULL;
    Py_INCREF(module);
    Py_INCREF(self);
    if (Py_REFCNT(object) - 1 != references_alone) { /* somebody may have copied the module's __dict__: whose call is it? */
        PyObject *called = PyObject_CallFunctionObjArgs(self->elsewhere, module, NULL);
        Py_DECREF(module);
        module = called;
    }
    int has = !module ? -1 : !self->on ? 0 : has_hooks(self->engine, module);
    if (has > 0) { /* from now on ours are hooks, too, in their place among the others */
        PyObject *done = tell(self->give_way == Py_None ? NULL : self->give_way, PyTuple_New(0));
        has = done ? 1 : -1;
        Py_XDECREF(done);
    }
    if (has > 0 || (has == 0 && !self->on)) result = run_module(module, args, kwargs);
    else if (has == 0) result = call_around(self, module, args, kwargs);
    Py_XDECREF(module);
    Py_DECREF(self);
    return result;
}

/* Of those arounds that are on: is each in its place? Somebody may have compiled a module. */
static int are_in_place(PyObject *arounds)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    while (PyDict_Next(arounds, &at, &key, &value)) {
        PyObject *owner = PyWeakref_GetObject(((Around *)key)->ref);
        PyObject *attributes = owner == Py_None ? NULL : PyObject_GenericGetDict(owner, NULL);
        if (!attributes) {
            PyErr_Clear();
            continue;
        }
        PyObject *found = PyDict_GetItemWithError(attributes, name_compiled);
        Py_DECREF(attributes);
        if (!found && PyErr_Occurred()) return -1;
        if (found != key) return 0;
    }
    return 1;
}

/* The same, on steps at rest, when only the roots have hooks; what stands around this one has just been called, if it is on. */
static int rests_in_place(Engine *engine, Place *place)
{
    Py_ssize_t count = engine->arounds ? PyDict_Size(engine->arounds) : -1;
    Around *around = (Around *)place->around;
    if (count == 0 || (count == 1 && around && Py_TYPE(around) == Around_Type && around->on)) return 1;
    return count > 0 ? are_in_place(engine->arounds) : 0;
}

static PyObject *all_in_place(PyObject *module, PyObject *arounds)
{
    (void)module;
    if (!PyDict_Check(arounds)) return PyErr_Format(PyExc_TypeError, "arounds must be a dict");
    int are = are_in_place(arounds);
    return are < 0 ? NULL : PyBool_FromLong(are);
}

static PyObject *around_copy(PyObject *object, PyObject *memo)
{
    (void)object, (void)memo;
    Py_RETURN_NONE; /* a copy of the module is called as if there were none */
}

static PyObject *nothing_parts; /* how a pickle makes None */

static PyObject *around_reduce(PyObject *object, PyObject *ignored)
{
    (void)object, (void)ignored;
    Py_INCREF(nothing_parts);
    return nothing_parts;
}

/* TorchScript's tracer asks this of a module's attributes before it takes them over, and cannot take over this one. */
static PyObject *around_modifier(PyObject *object, void *closure)
{
    Engine *engine = ((Around *)object)->engine;
    PyObject *all = engine && engine->arounds ? PyDict_Keys(engine->arounds) : PyList_New(0);
    (void)closure;
    for (Py_ssize_t i = 0; all && i < PyList_Size(all); i++) {
        PyObject *give_way = ((Around *)PyList_GetItem(all, i))->give_way;
        PyObject *done = tell(give_way == Py_None ? NULL : give_way, PyTuple_New(0));
        Py_XDECREF(done);
        if (!done) Py_CLEAR(all);
    }
    if (all) PyErr_SetString(PyExc_AttributeError, "_torchscript_modifier");
    Py_XDECREF(all);
    return NULL;
}

static PyObject *around_nothing(PyObject *object, void *closure)
{
    (void)object, (void)closure;
    Py_RETURN_NONE;
}

static PyGetSetDef around_getset[] = {
    {"before", around_nothing, NULL, "what stood here before: nothing, or it would not have been put here", NULL},
    {"_torchscript_modifier", around_modifier, NULL, "none; has hooks take the place of all of the session", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef around_methods[] = {
    {"__deepcopy__", around_copy, METH_O, NULL},
    {"__reduce__", around_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef around_members[] = {
    {"on", T_BOOL, offsetof(Around, on), 0, "whether calls are followed"},
    {"replaced", T_BOOL, offsetof(Around, replaced), 0, "whether hooks in the module's tables have taken its place for good"},
    {"yielded", T_BOOL, offsetof(Around, yielded), 0, "whether hooks in the module's tables follow its calls instead"},
    {"hook_before", T_OBJECT, offsetof(Around, before), READONLY, "the hook before a call, in Python"},
    {"hook_after", T_OBJECT, offsetof(Around, after), READONLY, "the hook after a call, in Python"},
    {"type", T_OBJECT, offsetof(Around, type), 0, "the module's class when it was put on"},
    {"give_way", T_OBJECT, offsetof(Around, give_way), 0, "has hooks in the module's tables take its place"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot around_slots[] = {
    {Py_tp_new, around_new},         {Py_tp_dealloc, around_dealloc}, {Py_tp_traverse, around_traverse},
    {Py_tp_clear, around_clear},     {Py_tp_call, around_call},       {Py_tp_methods, around_methods},
    {Py_tp_members, around_members}, {Py_tp_getset, around_getset}, {Py_tp_doc, "Around(engine, place, module, before, after, failed, elsewhere): what runs a module's calls."},
    {0, NULL},
};

static PyType_Spec around_spec = {.name = "tenterhook.native._calls.Around",
                                  .basicsize = sizeof(Around),
                                  .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                  .slots = around_slots};

#endif
