"""An ordinary MindSpore training script that knows nothing of tenterhook: a small CNN on real handwritten digits.

Record it, then look at it:

    tenterhook record examples/mindspore_digits.py
    tenterhook show @0
"""

from __future__ import annotations

import argparse

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from sklearn.datasets import load_digits


class Net(nn.Cell):
    """Two convolutions, dropout, and two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.SequentialCell(
            nn.Conv2d(1, 8, 3, pad_mode="same"),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, pad_mode="same"),
            nn.ReLU(),
            nn.MaxPool2d(2, stride=2),
        )
        self.dropout = nn.Dropout(p=0.25)
        self.fc1 = nn.Dense(16 * 4 * 4, 32)
        self.fc2 = nn.Dense(32, 10)

    def construct(self, images: ms.Tensor) -> ms.Tensor:
        x = self.features(images)
        x = self.dropout(x.reshape(x.shape[0], -1))
        return self.fc2(ops.relu(self.fc1(x)))


def load() -> tuple[np.ndarray, np.ndarray]:
    """Return images, float32 (1797, 1, 8, 8) in [0, 1], and labels, int32 (1797,)."""
    digits = load_digits()
    return digits.images.astype(np.float32)[:, None] / 16, digits.target.astype(np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-3)
    arguments = parser.parse_args()

    ms.set_context(pynative_synchronize=True)  # on a CPU that is faster, and errors come where they belong
    ms.set_seed(0)
    images, labels = load()
    held_out = 360
    net = Net()
    loss_function = nn.CrossEntropyLoss()
    optimizer = nn.Adam(net.trainable_params(), arguments.lr)
    forward_and_backward = ms.value_and_grad(lambda x, y: loss_function(net(x), y), None, optimizer.parameters)
    order = np.random.default_rng(0)
    for epoch in range(arguments.epochs):
        net.set_train()
        loss = ms.Tensor(0.0)
        for batch in np.array_split(order.permutation(np.arange(held_out, len(images))), 22):
            loss, gradients = forward_and_backward(ms.Tensor(images[batch]), ms.Tensor(labels[batch]))
            optimizer(gradients)
        net.set_train(False)
        right = (net(ms.Tensor(images[:held_out])).asnumpy().argmax(1) == labels[:held_out]).mean()
        print(f"epoch {epoch}: loss {float(loss.asnumpy()):.3f}, {right:.1%} of held-out digits right")


if __name__ == "__main__":
    main()
