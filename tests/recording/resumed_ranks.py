"""One rank of a training that goes on from its checkpoint: torchrun ... resumed_ranks.py HOW TARGET CHECKPOINT STEPS KILLED.

HOW is `session`, recorded by th.record from the checkpoint's step on, or `script`, recorded by the command around it. Once STEPS is
reached the ranks named in KILLED (`0,1`; empty for none) are killed; after step 3 all rest until their rows are on the disk.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

REST_AFTER = 3


class Net(nn.Sequential):
    """Two layers."""


def main() -> None:
    how, target, checkpoint, steps = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    killed = [int(rank) for rank in sys.argv[5].split(",") if rank]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = Net(nn.Linear(6, 5), nn.Linear(5, 2))
    begin = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        net.load_state_dict(saved["net"])
        begin = saved["step"]
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = contextlib.nullcontext()
    if how == "session":
        import tenterhook as th  # the script knows nothing of it

        session = th.record(model, tensors="0", kinds=["output", "grad_output"], to=target, resume=begin)
    with session:
        for step in range(begin, steps):
            batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            if rank == 0:
                draft = checkpoint.with_suffix(".tmp")
                torch.save({"net": net.state_dict(), "step": step + 1}, draft)
                draft.replace(checkpoint)
            dist.barrier()
            if step == REST_AFTER:
                time.sleep(2.5)
        dist.barrier()
        if rank in killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if killed:
            dist.barrier()  # which a killed rank never reaches
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
