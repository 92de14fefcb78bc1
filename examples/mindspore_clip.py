"""The same clip in MindSpore: a run that diverges, and the same training cell with the gradients of its weights clipped."""

from __future__ import annotations

import argparse

import mindspore as ms
import numpy as np
from mindspore import nn
from sklearn.datasets import load_digits

import tenterhook as th


def net() -> nn.Cell:
    ms.set_seed(0)
    layers: list[nn.Cell] = []
    for width in (64, 64, 64):
        layers += [nn.Dense(64, width, weight_init="HeUniform"), nn.ReLU()]
    return nn.SequentialCell(*layers, nn.Dense(64, 10))


def train(model: nn.Cell, images: np.ndarray, labels: np.ndarray, epochs: int) -> float:
    loss_of = nn.CrossEntropyLoss()
    optimizer = nn.SGD(model.trainable_params(), learning_rate=1.0)
    step = ms.value_and_grad(lambda x, y: loss_of(model(x), y), None, optimizer.parameters)
    random = np.random.default_rng(0)
    loss = ms.Tensor(0.0)
    for _ in range(epochs):
        for rows in np.array_split(random.permutation(1500), 30):
            loss, gradients = step(ms.Tensor(images[rows]), ms.Tensor(labels[rows]))
            optimizer(gradients)
    return float(loss.asnumpy())


def main(epochs: int) -> None:
    data = load_digits()
    images, labels = data.data.astype(np.float32), data.target.astype(np.int32)  # pixels from 0 to 16, as they come
    for clip in (None, th.edits.clip_norm(0.05)):
        model = net()
        with th.edit(model) as edit:
            if clip:
                edit.param_grad("**", clip)
            loss = train(model, images, labels, epochs)
        right = (model(ms.Tensor(images[1500:])).asnumpy().argmax(1) == labels[1500:]).mean()
        print(f"{clip or 'no clipping'!s:<16}  last loss {loss:7.4f}  accuracy {right:.3f}")
        if clip:
            print(edit)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=1)
    main(parser.parse_args().epochs)
