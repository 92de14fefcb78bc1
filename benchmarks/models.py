"""The networks that the benchmarks run, and one training step of each."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["MODELS", "build"]


class _Basic(nn.Module):
    """A basic residual block (He et al. 2015)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.downsample = (
            nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
            if stride != 1 or inside != outside
            else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class _ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(3, 2, 1)
        widths = [
            (64, 64, 1),
            (64, 64, 1),
            (64, 128, 2),
            (128, 128, 1),
            (128, 256, 2),
            (256, 256, 1),
            (256, 512, 2),
            (512, 512, 1),
        ]
        self.blocks = nn.Sequential(*(_Basic(*width) for width in widths))
        self.head = nn.Linear(512, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.pool(self.stem(x))).mean((2, 3)))


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.drop(self.proj(y.transpose(1, 2).reshape(batch, tokens, width)))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = _Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def _alexnet() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(
            nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
            nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
            nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        ),
        nn.AdaptiveAvgPool2d((6, 6)),
        nn.Flatten(),
        nn.Sequential(
            nn.Dropout(0.5), nn.Linear(9216, 4096), nn.ReLU(inplace=True),
            nn.Dropout(0.5), nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Linear(4096, 1000),
        ),
    )  # fmt: skip


def _small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Dropout(0.25), nn.Flatten(), nn.Linear(9216, 128), nn.Linear(128, 10),
    )  # fmt: skip


def _transformer() -> nn.Module:
    return nn.Sequential(*(_Block(256, 8) for _ in range(12)), nn.LayerNorm(256), nn.Linear(256, 512))


def _tiny(blocks: int) -> nn.Module:
    return nn.Sequential(*(module for _ in range(blocks) for module in (nn.Linear(8, 8), nn.ReLU())))


MODELS = {
    "alexnet": (_alexnet, (4, 3, 224, 224)),
    "small_cnn": (_small_cnn, (32, 1, 28, 28)),
    "transformer": (_transformer, (4, 128, 256)),
    "resnet": (_ResNet, (4, 3, 112, 112)),
    "tiny401": (lambda: _tiny(200), (4, 8)),
    "tiny2001": (lambda: _tiny(1000), (4, 8)),
}
"""Name -> (how to build it, shape of its input)."""


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Build a network with its input, both from a fixed seed."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    return make().train(), torch.randn(shape)
