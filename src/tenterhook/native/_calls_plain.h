/* Plain calls: how they begin and how they end. */
#ifndef TENTERHOOK_CALLS_PLAIN_H
#define TENTERHOOK_CALLS_PLAIN_H

#include "_calls_resting.h"
#include "_calls_taps.h"

/* Returns the innermost running call where this thread's calls take the native path and nothing unusual is going on. */
static Call *running_call(Engine *self)
{
    if (self->closed || !self->plain || !self->stack || self->ident != PyThread_get_thread_ident() || is_busy(self)) return NULL;
    Py_ssize_t depth = PyList_Size(self->stack);
    if (depth < 1) return NULL;
    PyObject *top = PyList_GetItem(self->stack, depth - 1);
    return Py_TYPE(top) == Call_Type ? (Call *)top : NULL;
}

/* Begins a call inside another one, `kwargs` may be NULL: 1, 0 where Python has to, -1 with an exception set. */
static int open_inside(Engine *self, PyObject *stack, Call *outer, Place *place, PyObject *module, PyObject *args, PyObject *kwargs)
{
    int due = place->due; /* looked at before the step that it speaks of, which is changed first */
    if (self->due_step >= 0 && outer->step != self->due_step) return 0; /* a thread, or rec.step(), has ended this call's step */
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
    long long now = now_ns(self), begun = now + self->origin_ns;
    if (self->unsure && begun - self->begun_ns > self->pause_ns) return 0; /* Python looks at what still runs */
    self->begun_ns = begun;
    Call *parent = outer->recorded ? outer : (Call *)outer->parent;
    long long seq = self->seq++;
    Call *call = call_make((PyObject *)place, (PyObject *)parent, seq, outer->step, self->thread, now);
    if (!call) return -1;
    call->tracks = (char)tracks;
    int failed = place_begin(place, call) || PyList_Append(stack, (PyObject *)call);
    if (!failed && place->wanted && due && self->follows) {
        call->followed = call->recorded = 1;
        if (self->wants_input) {
            PyObject *named = kwargs ? (Py_INCREF(kwargs), kwargs) : PyDict_New();
            PyObject *done = named ? tell(self->before, PyTuple_Pack(4, call, module, args, named)) : NULL;
            failed = !done;
            Py_XDECREF(done);
            Py_XDECREF(named);
        }
    }
    if (!failed && seq % SAMPLED == 0) self->hook_ns += (now_ns(self) - call->start_ns) * SAMPLED;
    Py_DECREF(call);
    return failed ? -1 : 1;
}

static int open_call(Engine *self, Place *place, PyObject *module, PyObject *args, PyObject *kwargs)
{
    Call *outer = running_call(self);
    if (!outer) return open_resting(self, place);
    if (!place->outer || place->outer != outer->watched) return 0;
    PyObject *stack = self->stack; /* both are the session's, which may end meanwhile */
    Py_INCREF(stack);
    Py_INCREF(outer);
    int begun = open_inside(self, stack, outer, place, module, args, kwargs);
    Py_DECREF(outer);
    Py_DECREF(stack);
    return begun;
}

/* Records what a call has given. 0, or -1 with an exception set. */
static int output_given(Engine *self, Call *call, PyObject *module, PyObject *output)
{
    DLTensor found;
    int dtype, done = ((Place *)call->watched)->keep ? 0 : is_plain(self, output, &found, &dtype);
    Subject of = {.call = call};
    if (done > 0 && self->wants_output && add_value(self, &of, &found, dtype) < 0) return -1;
    if (self->closed) return 0; /* by another thread, while that was measured: what follows is gone */
    PyObject *rest = NULL;
    if (done > 0 && self->wants_grad_output) {
        done = tap_output(self, call, output, module);
        if (!done) { /* the gradient only */
            rest = tell(self->values_of, PyTuple_Pack(4, call, module, output, Py_False));
            done = rest ? 1 : -1;
        }
    } else if (!done) {
        rest = tell(self->values_of, PyTuple_Pack(4, call, module, output, self->wants_output ? Py_True : Py_False));
        done = rest ? 1 : -1;
    }
    Py_XDECREF(rest);
    return done < 0 ? -1 : 0;
}

static int is_given(PyObject *object) { return object && object != Py_None; }

/* The innermost running call, if it is one of this place that native code may end; it need not have begun it. Borrowed. */
static Call *ending_call(Engine *self, Place *place)
{
    if (self->closed || !self->stack || self->ident != PyThread_get_thread_ident() || is_busy(self)) return NULL;
    Py_ssize_t depth = PyList_Size(self->stack);
    Call *call = depth > 0 ? (Call *)PyList_GetItem(self->stack, depth - 1) : NULL;
    if (!call || Py_TYPE(call) != Call_Type || call->watched != (PyObject *)place) return NULL;
    if (call->phase != word_forward || is_given(call->aliases) || (call->followed && !self->plain)) return NULL;
    if (call->regions != no_regions && PyObject_Size(call->regions) != 0) return NULL;
    return depth == 1 && any_in(self->notices) ? NULL : call;
}

/* Takes the innermost call off its thread's stack: 1, 0 where Python has to, -1 with an exception set. */
static int leave_stack(Engine *self, Call *call)
{
    PyObject *stack = self->stack; /* the session may end meanwhile */
    Py_ssize_t depth = PyList_Size(stack);
    int failed = 0, is = 1;
    Py_INCREF(stack);
    if (depth == 1) { /* a thread in which nothing runs has none */
        PyObject *thread = self->stacks ? PyLong_FromLongLong(call->thread) : NULL;
        is = thread && PyDict_GetItemWithError(self->stacks, thread) == stack;
        failed = PyErr_Occurred() || (is && PyDict_DelItem(self->stacks, thread));
        Py_XDECREF(thread);
    }
    if (!failed && is) failed = PyList_SetSlice(stack, depth - 1, depth, NULL);
    Py_DECREF(stack);
    return failed ? -1 : is;
}

/* Ends a call: 1, 0 where Python has to, -1 with an exception set. */
static int close_call(Engine *self, Place *place, PyObject *module, PyObject *output)
{
    Call *call = ending_call(self, place);
    if (!call) return 0;
    Py_INCREF(call);
    int left = leave_stack(self, call), failed = left < 0;
    if (left > 0 && call->followed) {
        long long now = now_ns(self);
        Call *parent = (Call *)call->parent;
        failed = call->recorded && add_call(self, call, parent, call->start_ns, now - call->start_ns);
        if (!failed && !self->closed && (self->wants_output || self->wants_grad_output)) failed = output_given(self, call, module, output);
        if (!failed && call->seq % SAMPLED == 0) self->hook_ns += (now_ns(self) - now) * SAMPLED;
    }
    Py_DECREF(call);
    return failed ? -1 : left;
}

#endif
