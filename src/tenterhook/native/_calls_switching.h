/* Taking what stands around the calls of many modules off, and putting it on again: between the steps of a sampled recording. */
#ifndef TENTERHOOK_CALLS_SWITCHING_H
#define TENTERHOOK_CALLS_SWITCHING_H

#include "_calls_around.h"

static PyObject *name_call;

/* Of the classes of modules the one that was looked at last: next to each other stand many of one. */
typedef struct {
    Engine *engine;
    PyObject *type;
    int room; /* of the class; no hooks are on all modules */
} Looked;

/* Returns what stands around the calls of a place's module, where nothing else is to be looked at; borrowed. */
static Around *around_of(Place *place)
{
    Around *around = (Around *)place->around;
    return around && Py_TYPE(around) == Around_Type && around->engine && !around->replaced ? around : NULL;
}

/* A module and its attributes, new references; NULL without an exception where the module is no more. */
static PyObject *attributes_of(Around *around, PyObject **module)
{
    *module = PyWeakref_GetObject(around->ref);
    Py_INCREF(*module);
    return *module == Py_None ? NULL : PyObject_GenericGetDict(*module, NULL);
}

static int left_to_python(PyObject *module)
{
    Py_XDECREF(module);
    return PyErr_Occurred() ? -1 : 0;
}

static int among_arounds(Around *around, int is)
{
    PyObject *arounds = around->engine->arounds, *object = (PyObject *)around;
    if (!arounds || !PyDict_Check(arounds)) return 0;
    if (is) return PyDict_SetItem(arounds, object, Py_None);
    int there = PyDict_Contains(arounds, object);
    return there > 0 ? PyDict_DelItem(arounds, object) : there;
}

/* Moves a reference and leaves None: what it refers to is not touched. */
static void move(PyObject **from, PyObject **to)
{
    PyObject *old = *to;
    *to = *from;
    *from = Py_None;
    Py_INCREF(Py_None);
    Py_XDECREF(old);
}

/* Takes one off: 1, 0 where Python has to, -1 with an exception set. */
static int take_off(Place *place)
{
    Around *around = around_of(place);
    PyObject *module = NULL, *attributes = around ? attributes_of(around, &module) : NULL;
    if (!attributes) return left_to_python(module);
    int taken = PyDict_GetItemWithError(attributes, name_compiled) == (PyObject *)around;
    Py_INCREF(around);
    int failed = PyErr_Occurred() || (taken && (PyDict_DelItem(attributes, name_compiled) || among_arounds(around, 0)));
    Py_DECREF(attributes);
    if (taken) {
        around->on = 0;
        move(&place->attachment, &place->resting);
    }
    Py_DECREF(around);
    Py_DECREF(module);
    return failed ? -1 : taken;
}

/* Whether a class's modules are called as they were, and no hooks are on all modules; -1 with an exception set. */
static int class_has_room(Engine *engine, PyObject *type)
{
    PyObject *call = PyObject_GetAttr(type, name_call), *compiled = call ? PyObject_GetAttr(type, name_compiled) : NULL;
    int room = !compiled ? -1 : call == engine->call && compiled == Py_None && !has_global_hooks(engine);
    Py_XDECREF(call);
    Py_XDECREF(compiled);
    return room;
}

/* Whether nothing has come to stand around a module's calls meanwhile; -1 with an exception set. */
static int has_room(Looked *last, Around *around, PyObject *module, PyObject *attributes)
{
    PyObject *type = (PyObject *)Py_TYPE(module);
    if (type != around->type) return 0; /* Python looks at what its new class does */
    PyObject *there = PyDict_GetItemWithError(attributes, name_compiled);
    if ((there && there != Py_None) || PyErr_Occurred()) return there ? 0 : -1;
    if (type != last->type || around->engine != last->engine) {
        int room = class_has_room(around->engine, type);
        if (room < 0) return -1;
        *last = (Looked){around->engine, type, room};
    }
    int hooks = last->room ? has_own_hooks(attributes) : 1;
    return hooks < 0 ? -1 : !hooks;
}

/* Puts one on again: 1, 0 where Python has to, -1 with an exception set. */
static int put_on(Place *place, Looked *last)
{
    Around *around = place->resting && place->resting != Py_None ? around_of(place) : NULL;
    PyObject *module = NULL, *attributes = around ? attributes_of(around, &module) : NULL;
    if (!attributes) return left_to_python(module);
    Py_INCREF(around); /* code of the module's class may run in between */
    int room = has_room(last, around, module, attributes);
    if (room > 0) {
        if (PyDict_SetItem(attributes, name_compiled, (PyObject *)around) || among_arounds(around, 1)) room = -1;
        around->on = 1;
        move(&place->resting, &place->attachment);
    }
    Py_DECREF(attributes);
    Py_DECREF(around);
    Py_DECREF(module);
    return room;
}

#if defined(__GNUC__)
#define FETCH(address) __builtin_prefetch((const void *)(address))
#else
#define FETCH(address) ((void)(address))
#endif
#define LINE 64
#define AHEAD 12 /* as many places as take about as long as the memory does */

/* Most of what is looked at has gone cold since the last step that was recorded. So it is asked for some places ahead, in the order
 * in which the one leads to the other: the place, what stands around its calls, the reference to the module. */
static void fetch_ahead(PyObject *places, Py_ssize_t at, Py_ssize_t count)
{
    if (at + AHEAD < count) {
        const char *place = (const char *)PyList_GetItem(places, at + AHEAD);
        FETCH(place), FETCH(place + LINE), FETCH(place + 2 * LINE); /* counts, flags, what stands around */
    }
    if (at + AHEAD / 3 * 2 < count) {
        const char *around = (const char *)((Place *)PyList_GetItem(places, at + AHEAD / 3 * 2))->around;
        if (around) FETCH(around), FETCH(around + LINE);
    }
    if (at + AHEAD / 3 < count) {
        Around *around = around_of((Place *)PyList_GetItem(places, at + AHEAD / 3));
        if (around) FETCH(around->ref);
    }
}

/* Goes through places, whose hooks are to be on or off and which are due or not; returns those that are left to Python. */
static PyObject *switch_all(PyObject *args, int on)
{
    PyObject *places;
    int due;
    if (!PyArg_ParseTuple(args, "O!p", &PyList_Type, &places, &due)) return NULL;
    for (Py_ssize_t i = 0; i < PyList_Size(places); i++)
        if (!PyObject_TypeCheck(PyList_GetItem(places, i), Place_Type)) return PyErr_Format(PyExc_TypeError, "a list of places is needed");
    PyObject *left = PyList_New(0);
    Looked last = {NULL, NULL, 0};
    for (Py_ssize_t i = 0; left && i < PyList_Size(places); i++) {
        PyObject *object = PyList_GetItem(places, i);
        Place *place = (Place *)object;
        int done = 1;
        Py_INCREF(object);
        fetch_ahead(places, i, PyList_Size(places));
        place->due = (char)due;
        if ((place->attachment && place->attachment != Py_None) != on) done = on ? put_on(place, &last) : take_off(place);
        if (done < 0 || (!done && PyList_Append(left, object))) Py_CLEAR(left);
        Py_DECREF(object);
    }
    return left;
}

static PyObject *take_all_off(PyObject *module, PyObject *args)
{
    (void)module;
    return switch_all(args, 0);
}

static PyObject *put_all_on(PyObject *module, PyObject *args)
{
    (void)module;
    return switch_all(args, 1);
}

#endif
