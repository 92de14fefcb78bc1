"""Look inside an AlexNet: inputs, outputs and gradients of chosen layers, on a photograph of a cat.

The layout is torchvision's, ReLUs in place and all. torchvision's own is used where it is installed; the weights are
random either way, since none are downloaded.

    python examples/alexnet_hooks.py
"""

from __future__ import annotations

import numpy as np
import torch
from skimage.data import chelsea
from skimage.transform import resize
from torch import nn

import tenterhook as th

WATCHED = ["features.11", "features.12", "features"]


class AlexNet(nn.Module):
    """The network of Krizhevsky (2014), "One weird trick for parallelizing convolutional neural networks"."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, kernel_size=11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(64, 192, kernel_size=5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(192, 384, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((6, 6))
        self.classifier = nn.Sequential(
            nn.Dropout(0.5),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, 1))


def build() -> nn.Module:
    """Return an AlexNet with random weights, in evaluation mode."""
    torch.manual_seed(0)
    try:
        from torchvision.models import alexnet  # pyright: ignore[reportMissingImports]
    except ImportError:
        return AlexNet().eval()
    return alexnet(weights=None).eval()


def cat() -> torch.Tensor:
    """Return a photograph of a cat twice, normalised as ImageNet is, float32 (2, 3, 224, 224)."""
    photo = resize(chelsea()[:, 75:375], (224, 224), anti_aliasing=True)
    normal = (photo - np.array([0.485, 0.456, 0.406])) / np.array([0.229, 0.224, 0.225])
    image = torch.tensor(normal.transpose(2, 0, 1), dtype=torch.float32)
    return torch.stack([image, image])


class Monitor:
    """A hook that is a method: it keeps what it sees on its object."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def on_output(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        self.shapes.append(tuple(output.shape))


def main() -> None:
    net, images = build(), cat()

    # Inputs, outputs and gradients of a list of layers, although every ReLU here works in place.
    with th.record(net, WATCHED, tensors=True) as rec:
        scores = net(images)
        scores[0, 0].backward()
    for path in WATCHED:
        layer = rec[path]
        print(f"{path:<12} in {tuple(layer.input['input'].shape)}  out {tuple(layer.output.shape)}", end="")
        print(f"  gradient {tuple(layer.grad_output.shape)}")

    first, last, container = (rec[path] for path in WATCHED)
    print("output of features.11 is the input of features.12:", torch.equal(first.output, last.input["input"]))
    print("output of features is the output of features.12:  ", torch.equal(container.output, last.output))
    print("gradients came in the order", [call.path for call in rec.order() if call.phase == "backward"])

    # A hook that is a method of an object.
    monitor = Monitor()
    with th.hooks(net) as hooks:
        hooks.forward(WATCHED, monitor.on_output)
        net(images)
    print("the monitor saw", monitor.shapes)

    # Change an output by returning another one: without the last pooling layer's output, every score is the bias's.
    with th.hooks(net) as hooks:
        hooks.forward("features.12", lambda module, args, output: torch.zeros_like(output))
        blind = net(images)
    print("with features.12 zeroed both images score alike:", torch.equal(blind[0], blind[1]))

    # Print the gradient of a tensor, change it, take the hook off again.
    x = torch.tensor([1.0], requires_grad=True)
    y = x**2
    with th.hooks(net).tensor(y, lambda grad: print("gradient of y:", grad.item()) or grad * 10):
        y.exp().sqrt().mean().backward()
    print("gradient of x, ten times what it was:", x.grad)


if __name__ == "__main__":
    main()
