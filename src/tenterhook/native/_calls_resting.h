/* Steps on which nothing is recorded and which calls of the root end: they are counted here, as tracker.py does, for as long as the
 * session has said that nothing else is to be done at their ends.
 */
#ifndef TENTERHOOK_CALLS_RESTING_H
#define TENTERHOOK_CALLS_RESTING_H

#include "_calls_rows.h"

static PyObject *token_key;
static long long threads_known;

static int rests_in_place(Engine *engine, Place *place);

/* Returns this thread's number among all that were asked; unlike its identifier no other thread gets it. -1 where there is none. */
static long long thread_token(void)
{
    PyObject *known = PyThreadState_GetDict();
    if (!known) return -1;
    PyObject *token = PyDict_GetItemWithError(known, token_key);
    if (token) return PyLong_AsLongLong(token);
    if (PyErr_Occurred()) return -1;
    token = PyLong_FromLongLong(threads_known);
    int failed = !token || PyDict_SetItem(known, token_key, token);
    Py_XDECREF(token);
    return failed ? -1 : threads_known++;
}

/* Whether no row has been written since the session began to rest: a gradient of an earlier step may come late. */
static int rows_rest(Engine *self)
{
    return self->serial == self->rest_serial && ((Table *)self->calls)->used == self->rest_calls
           && ((Table *)self->values)->used == self->rest_values;
}

static PyObject *engine_rest(PyObject *object, PyObject *args)
{
    Engine *self = (Engine *)object;
    PyObject *root;
    long long until, thread;
    int tracks;
    if (!PyArg_ParseTuple(args, "O!LLp", Place_Type, &root, &until, &thread, &tracks)) return NULL;
    if (self->closed || !self->calls || !self->values) Py_RETURN_NONE;
    self->rest_token = thread_token();
    if (self->rest_token < 0 && PyErr_Occurred()) return NULL;
    if (self->rest_token < 0) Py_RETURN_NONE;
    self->rest_until = until;
    self->rest_thread = thread;
    self->rest_tracks = (char)tracks;
    self->rest_serial = self->serial;
    self->rest_calls = ((Table *)self->calls)->used;
    self->rest_values = ((Table *)self->values)->used;
    put(&self->resting, root);
    Py_RETURN_NONE;
}

static PyObject *engine_wake(PyObject *object, PyObject *ignored)
{
    (void)ignored;
    Py_CLEAR(((Engine *)object)->resting);
    Py_RETURN_NONE;
}

static int is_root_at_rest(Engine *self, Place *place)
{
    return !self->closed && self->resting == (PyObject *)place && self->step + 1 < self->rest_until && !self->follows
           && self->stacks && rows_rest(self);
}

/* Whether a call of the root only ends a step and begins the next one: 1, 0 where Python has to look, -1 with an exception set. */
static int ends_step_at_rest(Engine *self, Place *place, int *tracks)
{
    if (!is_root_at_rest(self, place) || is_busy(self) || any_in(self->notices)) return 0;
    if (thread_token() != self->rest_token) return PyErr_Occurred() ? -1 : 0;
    long long task = running_task(self);
    if (task != -1) return task == -2 && PyErr_Occurred() ? -1 : 0;
    if ((*tracks = asks(self->grads_on)) < 0) return -1;
    if (*tracks) {
        PyObject *saved = self->rest_tracks ? PyObject_CallFunctionObjArgs(self->saved_hooks, Py_False, NULL) : Py_None;
        if (!saved) return -1;
        if (self->rest_tracks) Py_DECREF(saved);
        if (!self->rest_tracks || saved != Py_None) return 0;
    }
    return rests_in_place(self, place);
}

/* Begins an outermost call on a step that is not recorded: 1, 0 where Python has to, -1 with an exception set. */
static int open_resting(Engine *self, Place *place)
{
    int tracks, rests = ends_step_at_rest(self, place, &tracks);
    if (rests <= 0) return rests;
    PyObject *thread = PyLong_FromLongLong(self->rest_thread), *stack = thread ? PyList_New(0) : NULL;
    long long now = now_ns(self);
    Call *call = stack ? call_make((PyObject *)place, NULL, 0, 0, self->rest_thread, now) : NULL;
    int failed = !call || PyList_Append(stack, (PyObject *)call);
    /* What was made may have set the garbage collector off, and so anything. From here to the step's count nothing else runs. */
    int there = failed || !is_root_at_rest(self, place) ? 1 : PyDict_Contains(self->stacks, thread);
    if (!there && !(failed = PyDict_SetItem(self->stacks, thread, stack))) {
        long long seq = self->seq++;
        call->seq = seq;
        call->step = ++self->step;
        call->tracks = (char)tracks;
        self->begun_ns = now + self->origin_ns;
        self->thread = self->rest_thread;
        self->ident = PyThread_get_thread_ident();
        put(&self->stack, stack);
        failed = place_begin(place, call);
        if (!failed && seq % SAMPLED == 0) self->hook_ns += (now_ns(self) - now) * SAMPLED;
    }
    Py_XDECREF(call);
    Py_XDECREF(stack);
    Py_XDECREF(thread);
    return failed || there < 0 ? -1 : !there;
}

#endif
