/* The native path of a recording: begins and ends the plain calls of modules, and records their outputs and gradients, without
 * a frame of Python. Plain is a call of a watched module inside another one, outside of backward passes and checkpointing, that
 * gives a dense tensor on the host. All else goes to the Python code beside it (tracker.py, capture.py), which defines what is
 * recorded and runs alone where this was not built. CPython's limited API (3.10).
 */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#endif

#include "_calls_engine_type.h"
#include "_calls_hooks.h"
#include "_calls_switching.h"

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
    PyObject *capsule, *function, *parts, *nothing;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOO!O!", &capsule, &function, &PyTuple_Type, &parts, &PyTuple_Type, &nothing)) return NULL;
    kernel = PyCapsule_GetPointer(capsule, KERNEL_API_NAME);
    if (!kernel) return NULL;
    put(&inert, function);
    put(&inert_parts, parts);
    put(&nothing_parts, nothing);
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"set_outer", set_outer, METH_VARARGS, "set_outer(place, outer): calls of the one inside the other are nothing unusual."},
    {"connect", connect, METH_VARARGS, "connect(kernel api, inert function, how a pickle makes it, how it makes None): to be called once, first."},
    {"all_in_place", all_in_place, METH_O, "all_in_place(arounds) -> bool: whether each of them is still what runs its module."},
    {"take_all_off", take_all_off, METH_VARARGS, "take_all_off(places, due) -> list: take what stands around their modules' calls off; those left to Python."},
    {"put_all_on", put_all_on, METH_VARARGS, "put_all_on(places, due) -> list: put it on again; those left to Python."},
    {NULL, NULL, 0, NULL},
};

static int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **type, const char *name)
{
    *type = (PyTypeObject *)PyType_FromSpec(spec);
    return !*type || PyModule_AddObjectRef(module, name, (PyObject *)*type);
}

static int module_exec(PyObject *module)
{
    token_key = PyUnicode_InternFromString("tenterhook.native._calls");
    word_forward = PyUnicode_InternFromString("forward");
    word_backward = PyUnicode_InternFromString("backward");
    no_regions = PyTuple_New(0);
    name_hooks = PyUnicode_InternFromString("_backward_hooks");
    name_grad_fn = PyUnicode_InternFromString("grad_fn");
    name_requires_grad = PyUnicode_InternFromString("requires_grad");
    name_register = PyUnicode_InternFromString("_register_hook_dict");
    name_call_impl = PyUnicode_InternFromString("_call_impl");
    name_call = PyUnicode_InternFromString("__call__");
    name_compiled = PyUnicode_InternFromString("_compiled_call_impl");
    const char *tables[TABLES] = {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"};
    for (int i = 0; i < TABLES; i++)
        if (!(name_tables[i] = PyUnicode_InternFromString(tables[i]))) return -1;
    port_key = PyLong_FromLong(-1); /* handles of torch count up from 0 */
    if (!token_key || !word_forward || !word_backward || !no_regions || !name_hooks || !name_grad_fn || !name_requires_grad || !name_register
        || !port_key || !name_call_impl || !name_call || !name_compiled)
        return -1;
    return add_type(module, &table_spec, &Table_Type, "Table") || add_type(module, &place_spec, &Place_Type, "Place")
                   || add_type(module, &call_spec, &Call_Type, "LiveCall")
                   || add_type(module, &engine_spec, &Engine_Type, "Engine")
                   || add_type(module, &port_spec, &Port_Type, "Port")
                   || add_type(module, &call_tap_spec, &CallTap_Type, "CallTap")
                   || add_type(module, &before_spec, &Before_Type, "Before")
                   || add_type(module, &after_spec, &After_Type, "After")
                   || add_type(module, &around_spec, &Around_Type, "Around")
               ? -1
               : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "tenterhook.native._calls",
    .m_doc = "The plain calls of modules, recorded without a frame of Python.",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__calls(void) { return PyModuleDef_Init(&module_definition); }
