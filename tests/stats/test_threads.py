"""Several threads on one tensor: the same to the bit, nobody waits for anybody else's, and a fork has its own."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tenterhook.stats import KERNELS, THREADED_NUMEL, RowBuffer, set_threads, threads
from tenterhook.stats.layout import DTYPES
from tests.stats.arrays import values

NATIVE = [kernel for kernel in KERNELS if kernel != "numpy"]
native = pytest.mark.skipif(not NATIVE, reason="the kernel is not built here: only the twin exists")


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    before = threads()
    yield
    set_threads(before)


def measured(array: np.ndarray, count: int, kernel: str = KERNELS[0], offset: int = 0) -> tuple[bytes, bytes, int]:
    set_threads(count)
    buffer = RowBuffer(1, kernel=kernel)
    assert buffer.measure_array(0, array, offset)
    return buffer.statistics.tobytes(), buffer.sketches.tobytes(), int(buffer.digests[0])


@native
@pytest.mark.parametrize("kernel", NATIVE)
@pytest.mark.parametrize("kind", ["normal", "masked", "cancelling", "huge", "bits"])
def test_the_number_of_threads_changes_no_bit(kernel: str, kind: str) -> None:
    for dtype in DTYPES:
        array = values(np.random.default_rng(3), dtype, THREADED_NUMEL + 70_001, kind)
        alone = measured(array, 1, kernel, 77)
        for count in (2, 3, 8):
            assert measured(array, count, kernel, 77) == alone, (dtype, count)


@native
def test_the_number_of_threads_changes_no_bit_of_views_and_long_tensors() -> None:
    rng = np.random.default_rng(4)
    storage = rng.standard_normal((70, 80, 90)).astype(np.float32)
    views = [storage.transpose(2, 0, 1), storage[::-1, ::2, ::-1].repeat(4, 0), storage.transpose(1, 2, 0)[::-1]]
    views += [np.broadcast_to(storage[:1, :, :1], (70, 80, 90)), rng.standard_normal(6_000_001).astype(np.float32)]
    for view in views:
        assert view.size >= THREADED_NUMEL
        alone = measured(view, 1)
        assert measured(np.ascontiguousarray(view), 1) == alone
        assert all(measured(view, count) == alone for count in (2, 5))


@native
def test_threads_of_the_program_measure_large_tensors_at_once() -> None:
    arrays = [np.random.default_rng(seed).standard_normal(400_000 + seed).astype(np.float32) for seed in range(12)]
    alone = [measured(array, 1) for array in arrays]
    set_threads(3)
    buffer = RowBuffer(12)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert all(pool.map(buffer.measure_array, range(12), arrays))
            rows = zip(buffer.statistics, buffer.sketches, buffer.digests, strict=True)
            assert [(s.tobytes(), k.tobytes(), int(d)) for s, k, d in rows] == alone


_PROGRAM = """
import os, sys
import numpy as np
from tenterhook.stats import RowBuffer, set_threads

def os_threads():
    return len(os.listdir("/proc/self/task"))

def measured():
    buffer = RowBuffer(1)
    buffer.measure_array(0, array)
    return buffer.statistics.tobytes() + buffer.sketches.tobytes()

array = np.arange(600_000, dtype=np.float32)
at_first = os_threads()
set_threads(3)
sleeping = os_threads() == at_first
RowBuffer(1).measure_array(0, array[:1000])
small = os_threads() - at_first
expected = measured()
large = os_threads() - at_first
child = os.fork()
if child == 0:
    before = os_threads()
    same = measured() == expected
    os._exit(10 * same + os_threads() - before)
print(sleeping, small, large, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), measured() == expected)
"""


@native
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts the process's threads where Linux lists them")
def test_threads_start_when_a_large_tensor_comes_and_again_after_a_fork() -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.stdout.strip(), done.stderr) == ("True 0 2 12 True", "")


@pytest.mark.parametrize(("variable", "expected"), [("3", 3), ("2,4", 2), ("", 1), ("many", 1), ("1000", 64)])
def test_the_environment_says_how_many_at_first(variable: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    program = "from tenterhook.stats import threads; print(threads())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) == (expected if NATIVE else 1)


def test_less_than_one_thread_is_refused() -> None:
    with pytest.raises(ValueError, match="must be 1 or more, got 0"):
        set_threads(0)


@native
def test_the_torch_backend_takes_the_number_of_torch() -> None:
    import torch

    import tenterhook as th

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        set_threads(1)
        model = torch.nn.Sequential(torch.nn.Identity())  # inside of another module calls are followed natively
        with th.record(model, "0"):
            model(torch.ones(1000))
            assert threads() == 1
            model(torch.ones(THREADED_NUMEL))
            assert threads() == 2
            torch.set_num_threads(1)
            model(torch.ones(2, THREADED_NUMEL).t())
            assert threads() == 1
    finally:
        torch.set_num_threads(before)


@native
@pytest.mark.parametrize("kernel", NATIVE)
def test_the_interpreter_runs_on_while_a_large_tensor_is_measured(kernel: str) -> None:
    """With no turns being forced, another thread gets one only where the kernel gives the lock back."""
    turns, over, one = [0], threading.Event(), np.ones(1, np.float32)
    buffer = RowBuffer(1, kernel=kernel)

    def count() -> None:
        while not over.is_set():
            turns[0] += 1
            time.sleep(0)  # gives the lock back of its own accord

    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    thread = threading.Thread(target=count)
    try:
        thread.start()
        for _ in range(200):
            small, address = turns[0], one.__array_interface__["data"][0]
            buffer.measure(0, address, "float32", (1000,), (0,))
            assert turns[0] == small, "for a small one the lock is kept: giving it back costs more"
            buffer.measure(0, address, "float32", (1 << 24,), (0,))
            if turns[0] > small:
                break
    finally:
        over.set()
        sys.setswitchinterval(before)
        thread.join()
    assert turns[0] > small
