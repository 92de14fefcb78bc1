/* Taking what stands around the calls of many modules off, and putting it on again: between the steps of a sampled recording. */
#ifndef TENTERHOOK_CALLS_SWITCHING_H
#define TENTERHOOK_CALLS_SWITCHING_H

#include "_calls_around.h"

static PyObject *name_call;

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
    if (!around->engine->arounds || !PyDict_Check(around->engine->arounds)) return 0;
    PyObject *key = PyLong_FromVoidPtr(around); /* its id */
    if (!key) return -1;
    int failed = 0;
    if (is) failed = PyDict_SetItem(around->engine->arounds, key, (PyObject *)around);
    else if (PyDict_GetItemWithError(around->engine->arounds, key)) failed = PyDict_DelItem(around->engine->arounds, key);
    Py_DECREF(key);
    return failed || PyErr_Occurred() ? -1 : 0;
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
        put(&place->resting, place->attachment);
        put(&place->attachment, Py_None);
    }
    Py_DECREF(around);
    Py_DECREF(module);
    return failed ? -1 : taken;
}

/* Whether nothing has come to stand around a module's calls meanwhile; -1 with an exception set. */
static int has_room(Around *around, PyObject *module, PyObject *attributes)
{
    Engine *engine = around->engine;
    if ((PyObject *)Py_TYPE(module) != around->type) return 0; /* Python looks at what its new class does */
    PyObject *there = PyDict_GetItemWithError(attributes, name_compiled);
    if ((there && there != Py_None) || PyErr_Occurred()) return there ? 0 : -1;
    PyObject *type = (PyObject *)Py_TYPE(module), *call = PyObject_GetAttr(type, name_call);
    PyObject *compiled = call ? PyObject_GetAttr(type, name_compiled) : NULL;
    int room = !compiled ? -1 : call == engine->call && compiled == Py_None;
    Py_XDECREF(call);
    Py_XDECREF(compiled);
    if (room <= 0) return room;
    int hooks = has_hooks(engine, module);
    return hooks < 0 ? -1 : !hooks;
}

/* Puts one on again: 1, 0 where Python has to, -1 with an exception set. */
static int put_on(Place *place)
{
    Around *around = place->resting && place->resting != Py_None ? around_of(place) : NULL;
    PyObject *module = NULL, *attributes = around ? attributes_of(around, &module) : NULL;
    if (!attributes) return left_to_python(module);
    Py_INCREF(around); /* code of the module's class may run in between */
    int room = has_room(around, module, attributes);
    if (room > 0) {
        if (PyDict_SetItem(attributes, name_compiled, (PyObject *)around) || among_arounds(around, 1)) room = -1;
        around->on = 1;
        put(&place->attachment, place->resting);
        put(&place->resting, Py_None);
    }
    Py_DECREF(attributes);
    Py_DECREF(around);
    Py_DECREF(module);
    return room;
}

/* Goes through places, whose hooks are to be on or off and which are due or not; returns those that are left to Python. */
static PyObject *switch_all(PyObject *args, int on)
{
    PyObject *places;
    int due;
    if (!PyArg_ParseTuple(args, "O!p", &PyList_Type, &places, &due)) return NULL;
    PyObject *left = PyList_New(0);
    for (Py_ssize_t i = 0; left && i < PyList_Size(places); i++) {
        PyObject *object = PyList_GetItem(places, i);
        int done = PyObject_TypeCheck(object, Place_Type) ? 1 : -1;
        if (done < 0) PyErr_SetString(PyExc_TypeError, "a list of places is needed");
        Place *place = (Place *)object;
        Py_INCREF(object);
        if (done > 0) {
            place->due = (char)due;
            if ((place->attachment && place->attachment != Py_None) != on) done = on ? put_on(place) : take_off(place);
        }
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
