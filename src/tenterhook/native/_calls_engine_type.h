/* The engine as Python sees it. */
#ifndef TENTERHOOK_CALLS_ENGINE_TYPE_H
#define TENTERHOOK_CALLS_ENGINE_TYPE_H

#include "_calls_resting.h"

static PyMethodDef engine_methods[] = {
    {"enter", engine_enter, METH_VARARGS, "enter(stack, thread): this thread's calls take the native path from now on."},
    {"use", engine_use, METH_VARARGS, "use(calls, values, measured): write to these tables, measure into these rows."},
    {"record", engine_record, METH_VARARGS,
     "record(site, tensor, step) -> bool: add the row of a tensor that belongs to no call; False where that is for Python to do."},
    {"rest", engine_rest, METH_VARARGS,
     "rest(root, until, thread, tracks): until that step the calls of this root, in this thread, end steps on which nothing is recorded."},
    {"wake", engine_wake, METH_NOARGS, "wake(): what ends a step is for Python to say again."},
    {"close", engine_close, METH_NOARGS, "close(): do nothing any more, and let go of the session."},
    {NULL, NULL, 0, NULL},
};

#define OBJECT(name) {#name, T_OBJECT, offsetof(Engine, name), 0, NULL}
#define NUMBER(name) {#name, T_LONGLONG, offsetof(Engine, name), 0, NULL}
#define FLAG(name) {#name, T_BOOL, offsetof(Engine, name), 0, NULL}
static PyMemberDef engine_members[] = {
    OBJECT(graph_task), OBJECT(grads_on), OBJECT(forward_ad_on), OBJECT(saved_hooks), OBJECT(inference_on), OBJECT(modes_on), OBJECT(is_neg), OBJECT(is_view), OBJECT(threads), OBJECT(kernel_threads),
    OBJECT(tensor_types), OBJECT(dtype_names), OBJECT(new_hooks), OBJECT(tracing), OBJECT(call), OBJECT(call_impl), OBJECT(before), OBJECT(values_of), OBJECT(value),
    OBJECT(came), OBJECT(fault), OBJECT(calls_full), OBJECT(values_full), OBJECT(acquire), OBJECT(release), OBJECT(owner),
    OBJECT(busy), OBJECT(stacks), OBJECT(notices), NUMBER(step), NUMBER(due_step), OBJECT(outer_passes), OBJECT(global_tables), OBJECT(arounds), NUMBER(seq), NUMBER(origin_ns), NUMBER(pass_token), NUMBER(begun_ns), NUMBER(pause_ns), NUMBER(calls_recorded),
    NUMBER(values_recorded), NUMBER(hook_ns), NUMBER(storage_place), NUMBER(storage_size), NUMBER(storage_offset),
    FLAG(closed), FLAG(follows), FLAG(wants_input), FLAG(wants_output),
    FLAG(wants_grad_output), FLAG(measures), FLAG(plain), {NULL, 0, 0, 0, NULL},
};
#undef OBJECT
#undef NUMBER
#undef FLAG

static PyType_Slot engine_slots[] = {
    {Py_tp_new, engine_new},         {Py_tp_dealloc, engine_dealloc}, {Py_tp_traverse, engine_traverse},
    {Py_tp_clear, engine_clear},     {Py_tp_methods, engine_methods}, {Py_tp_members, engine_members},
    {Py_tp_iternext, engine_next},   {Py_tp_iter, engine_iter}, {Py_tp_doc, "Engine(exchange, clock): the native path of one session."},
    {0, NULL},
};

static PyType_Spec engine_spec = {.name = "tenterhook.native._calls.Engine",
                                  .basicsize = sizeof(Engine),
                                  .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                  .slots = engine_slots};

#endif
