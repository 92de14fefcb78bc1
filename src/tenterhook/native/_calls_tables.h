/* What all of the native call path uses, and the tables of rows that it shares with Python. */
#ifndef TENTERHOOK_CALLS_TABLES_H
#define TENTERHOOK_CALLS_TABLES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#define NO_NUMBER (-1) /* stands for None in the tables */

static PyTypeObject *Table_Type;

static PyObject *allocate(PyTypeObject *type)
{
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    return alloc(type, 0);
}

static void release_object(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static void put(PyObject **place, PyObject *value)
{
    PyObject *old = *place;
    Py_XINCREF(value);
    *place = value;
    Py_XDECREF(old);
}

/* Calls what is the session's, with a tuple of arguments, which is taken over. The session may end at any time that Python runs:
 * then there is nothing to call any more, and what is called may be let go while it runs. */
static PyObject *tell(PyObject *function, PyObject *arguments)
{
    PyObject *result = NULL;
    if (arguments && !function) {
        Py_INCREF(Py_None);
        result = Py_None;
    } else if (arguments) {
        Py_INCREF(function);
        result = PyObject_CallObject(function, arguments);
        Py_DECREF(function);
    }
    Py_XDECREF(arguments);
    return result;
}

/* --- tables: rows of whole numbers, objects by their code ------------------------------------------------------------ */
typedef struct {
    PyObject_HEAD
    PyObject *codes;   /* dict: object -> code */
    PyObject *objects; /* list: code -> object */
    PyObject *owner;   /* keeps the memory alive */
    int64_t *memory;
    Py_ssize_t capacity, width, used, reserved;
    long long lineage; /* tables that go on with each other's codes have the same */
} Table;

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *address, *owner, *after = Py_None;
    Py_ssize_t capacity, width;
    static long long lineages;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!nnO|O", &PyLong_Type, &address, &capacity, &width, &owner, &after)) return NULL;
    if (after != Py_None && Py_TYPE(after) != Table_Type) return PyErr_Format(PyExc_TypeError, "after must be a Table");
    void *memory = PyLong_AsVoidPtr(address);
    if (PyErr_Occurred()) return NULL;
    Table *self = (Table *)allocate(type);
    if (!self) return NULL;
    self->memory = memory;
    self->capacity = capacity;
    self->width = width;
    Py_INCREF(owner);
    self->owner = owner;
    if (after != Py_None) {
        put(&self->codes, ((Table *)after)->codes);
        put(&self->objects, ((Table *)after)->objects);
        self->lineage = ((Table *)after)->lineage;
    } else {
        self->codes = PyDict_New();
        self->objects = PyList_New(0);
        self->lineage = ++lineages;
    }
    if (!self->codes || !self->objects) Py_CLEAR(self);
    return (PyObject *)self;
}

static void table_dealloc(PyObject *object)
{
    Table *self = (Table *)object;
    Py_CLEAR(self->codes);
    Py_CLEAR(self->objects);
    Py_CLEAR(self->owner);
    release_object(object);
}

/* Returns the code of an object, which is new or known; -2 with an exception set. */
static int64_t table_code(Table *self, PyObject *object)
{
    PyObject *code = PyDict_GetItemWithError(self->codes, object);
    if (code) return PyLong_AsLongLong(code);
    if (PyErr_Occurred()) return -2;
    Py_ssize_t count = PyList_Size(self->objects);
    code = PyLong_FromSsize_t(count);
    if (!code) return -2;
    int failed = PyDict_SetItem(self->codes, object, code) || PyList_Append(self->objects, object);
    Py_DECREF(code);
    return failed ? -2 : count;
}

static PyObject *table_add(PyObject *object, PyObject *row)
{
    Table *self = (Table *)object;
    if (!PyTuple_Check(row) || PyTuple_Size(row) != self->width) {
        PyErr_Format(PyExc_ValueError, "a row of this table is a tuple of %zd items", self->width);
        return NULL;
    }
    if (self->used >= self->capacity) Py_RETURN_FALSE;
    int64_t *cells = self->memory + self->used * self->width;
    for (Py_ssize_t i = 0; i < self->width; i++) {
        PyObject *item = PyTuple_GetItem(row, i);
        if (item == Py_None) cells[i] = NO_NUMBER;
        else if (PyLong_Check(item)) {
            cells[i] = PyLong_AsLongLong(item);
            if (cells[i] == -1 && PyErr_Occurred()) return NULL;
        } else if ((cells[i] = table_code(self, item)) == -2) return NULL;
    }
    self->used++;
    Py_RETURN_TRUE;
}

static PyObject *table_reserve(PyObject *object, PyObject *ignored)
{
    Table *self = (Table *)object;
    (void)ignored;
    return PyLong_FromSsize_t(self->reserved < self->capacity ? self->reserved++ : -1);
}

static PyMethodDef table_methods[] = {
    {"add", table_add, METH_O,
     "add(row) -> bool: add a row, a tuple; what is neither a whole number nor None goes by its code. False without room."},
    {"reserve", table_reserve, METH_NOARGS, "reserve() -> int: take the next row of the block beside it, -1 without any left."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef table_members[] = {
    {"objects", T_OBJECT_EX, offsetof(Table, objects), READONLY, "code -> object"},
    {"capacity", T_PYSSIZET, offsetof(Table, capacity), READONLY, "rows that fit"},
    {"used", T_PYSSIZET, offsetof(Table, used), READONLY, "rows that are there"},
    {"reserved", T_PYSSIZET, offsetof(Table, reserved), READONLY, "rows of a block beside it that are spoken for"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot table_slots[] = {
    {Py_tp_new, table_new},         {Py_tp_dealloc, table_dealloc}, {Py_tp_methods, table_methods},
    {Py_tp_members, table_members}, {Py_tp_doc, "Table(address, capacity, width, owner, after=None): rows of int64 in memory of somebody's; goes on with the codes of `after`."},
    {0, NULL},
};

static PyType_Spec table_spec = {
    .name = "tenterhook.native._calls.Table", .basicsize = sizeof(Table), .flags = Py_TPFLAGS_DEFAULT, .slots = table_slots};

#endif
