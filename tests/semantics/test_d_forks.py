"""Section D, row 52: a child that the process forks while a session is on."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
from torch import nn

import tenterhook as th

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
