"""Four jobs for hooks in MindSpore, on real handwritten digits: watch, clip, regularise, and check what is loaded.

python examples/mindspore_hooks.py
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import nn
from sklearn.datasets import load_digits

import tenterhook as th
import tenterhook.mindspore  # gives cells register_load_param_into_net_post_hook


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.relu, self.fc2 = nn.Dense(64, 32), nn.ReLU(), nn.Dense(32, 10)

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.fc2(self.relu(self.fc1(x)))


def batch(size: int = 64) -> tuple[ms.Tensor, ms.Tensor]:
    """Return images, float32 (size, 64), and labels, int32 (size,)."""
    digits = load_digits()
    return ms.Tensor(digits.data[:size].astype(np.float32) / 16), ms.Tensor(digits.target[:size].astype(np.int32))


def norm(tensor: ms.Tensor) -> float:
    return float(np.linalg.norm(tensor.asnumpy()))


def watch(net: Net) -> None:
    """See what each cell gives, and the gradient that comes back to it; nothing of the training changes."""
    x, y = batch()
    loss = nn.CrossEntropyLoss()
    optimizer = nn.Adam(net.trainable_params(), 1e-2)
    step = ms.value_and_grad(lambda images, labels: loss(net(images), labels), None, optimizer.parameters)
    with th.hooks(net) as hooks:
        hooks.forward(
            "**", lambda name, cell, args, out: print(f"  {name or '(root)':6} gives {out.shape}"), with_name=True
        )
        hooks.backward(
            "fc*",
            lambda name, cell, into, out: print(f"  {name:6} gets a gradient of norm {norm(out[0]):.4f}"),
            with_name=True,
        )
        step(x, y)
    with th.record(net, kinds=["output", "grad_output", "param_grad"]) as rec:
        for _ in range(5):
            _, gradients = step(x, y)
            optimizer(gradients)
    rows = rec.query(
        "select step, rms from values where path = 'fc1' and kind = 'param_grad' and slot = 'weight' order by step"
    )
    print("  gradient of fc1.weight, rms by step:", " ".join(f"{row['rms']:.5f}" for row in rows.to_pylist()))


def clip(net: Net, limit: float = 0.01) -> None:
    """Clip the gradient of one activation by its norm, so that what lies before it gets no more than that."""
    x, y = batch()
    loss = nn.CrossEntropyLoss()
    step = ms.value_and_grad(lambda images, labels: loss(net(images), labels), None, net.trainable_params())
    seen: list[float] = []

    def clipped(gradient: ms.Tensor) -> ms.Tensor | None:
        seen.append(norm(gradient))
        return gradient * (limit / seen[-1]) if seen[-1] > limit else None

    with th.hooks(net) as hooks:
        hooks.forward("relu", lambda cell, args, out: hooks.tensor(out, clipped) and None)
        hooks.backward_pre("fc1", lambda cell, out: seen.append(norm(out[0])))
        step(x, y)
    print(f"  norm {seen[0]:.4f} before; what reaches fc1 has at most {limit}: {seen[1] <= limit}")


def regularise(net: Net, decay: float = 0.1) -> None:
    """Add weight decay to the gradients of the weights, and of nothing else."""
    x, y = batch()
    loss = nn.CrossEntropyLoss()
    weights = net.trainable_params()
    step = ms.value_and_grad(lambda images, labels: loss(net(images), labels), None, weights)
    by_name = dict(net.parameters_and_names())
    _, bare = step(x, y)
    with th.hooks(net) as hooks:
        hooks.param_grad("*.weight", lambda name, gradient: gradient + decay * by_name[name])
        _, decayed = step(x, y)
    for parameter, before, after in zip(weights, bare, decayed, strict=True):
        added = np.allclose(after.asnumpy() - before.asnumpy(), decay * parameter.asnumpy(), atol=1e-6)
        print(
            f"  {parameter.name:10} decay in its gradient: {added and not np.array_equal(after.asnumpy(), before.asnumpy())}"
        )


def check_load(net: Net) -> None:
    """Say at the moment of loading what is missing and what is too much, and forgive what is known."""
    saved = {name: ms.Parameter(value.copy(), name=name) for name, value in net.parameters_and_names()}
    saved["head.weight"] = saved.pop("fc2.weight")
    fresh = Net()

    def report(cell: nn.Cell, keys: tenterhook.mindspore.IncompatibleKeys) -> None:
        print("  missing:", keys.missing_keys, " not asked for:", keys.unexpected_keys)
        keys.unexpected_keys.remove("head.weight")

    handle = fresh.register_load_param_into_net_post_hook(report)
    missing, unexpected = ms.load_param_into_net(fresh, saved, strict_load=True)
    handle.remove()
    print("  load_param_into_net returns:", missing, unexpected)


def main() -> None:
    ms.set_seed(0)
    ms.set_context(pynative_synchronize=True)
    net = Net()
    for job in (watch, clip, regularise, check_load):
        print(f"{job.__name__}: {(job.__doc__ or '').splitlines()[0]}")
        job(net)
    print("hooks left on the model:", len(th.installed_hooks(net)))


if __name__ == "__main__":
    main()
