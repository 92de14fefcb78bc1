"""Writes a recording until it is killed: python -m tests.recording.killed_writer TARGET INTERVAL ROLL_BYTES.

Says on its standard output what it has handed over and when: "STEP SECONDS", flushed, one line each.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from tenterhook.recording import DiskSink, Manifest, Pace
from tests.recording.synthetic import step_of_rows


def main(target: str, interval: float, roll_bytes: int) -> None:
    """Write steps of ten rows and a tensor for ever."""
    sink = DiskSink(target, Manifest(), pace=Pace(flush_interval=interval, roll_bytes=roll_bytes, shard_bytes=40_000))
    step = 0
    while True:
        calls, values = step_of_rows(step)
        sink.write_calls(calls)
        sink.write_values(values)
        sink.write_tensor(f"t{step}", np.full(100, step, np.int32))
        print(step, time.time(), flush=True)
        step += 1
        time.sleep(0.0005)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
