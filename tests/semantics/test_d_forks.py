"""Section D, row 52: a child that the process forks while a session is on."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tenterhook as th
from tenterhook import _fork_locks

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]


def test_a_child_goes_on_with_a_copy_of_a_recording_in_memory() -> None:
    """Row 52: also where another thread of the parent held the locks at that moment; the parent's recording is its own."""
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.ones(1, 2)
    with th.record(model, tensors=True) as rec:
        model(x)
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with rec._capture.rows._lock, rec._capture.tracker._lock, rec._sink._lock:  # type: ignore[union-attr]
                held.set()
                done.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(60)
        child = os.fork()
        if child == 0:
            signal.alarm(30)  # a child that hangs is ended, and fails the test
            model(x)
            calls = len([call for call in rec.order() if call.phase == "forward"])
            os._exit(0 if calls == 6 else 1)
        done.set()
        thread.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(rec.order()) == 3
        model(x)
    assert len(rec.order()) == 6


def test_a_child_can_use_what_other_threads_held() -> None:
    """Row 52, same kind: what sessions share in the process, hooks on functions and hook points, whoever was amid them."""
    model, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2)
    point = th.HookPoint("here")
    point.register(lambda value: None)
    locks = list(_fork_locks._all)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # a child that hangs is ended, and fails the test
        calls = []
        point(1)
        with th.hooks(model) as hooks, th.record(model) as rec, th.edit(model) as edit:
            edit.output("0", th.edits.scale(2.0))
            hooks.after(torch, "tanh", lambda *arguments: calls.append(1))
            handle = hooks.forward("0", lambda *arguments: calls.append(2))
            checkpoint(model, x.requires_grad_(), use_reentrant=True).sum().backward()
            torch.tanh(x)
            handle.remove()
        os._exit(0 if calls.count(1) == 1 and calls.count(2) >= 1 and rec.order() else 1)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_lock_that_the_forking_thread_holds_stays_its_own() -> None:
    """Row 52, same kind: a process that forks in a callback goes on in both."""
    point = th.HookPoint("here")
    with point._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            try:
                handle = point.register(lambda value: None)
                handle.remove()
            finally:
                os._exit(0 if len(point) == 0 and not handle.live else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
