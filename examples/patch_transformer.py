"""Which head does it, and where does the answer travel: head ablation and a patch sweep on a small transformer.

The transformer learns in seconds to answer a pointer: eight digits, and a token that says which of them to repeat. Then its
heads are left out one by one, and activations of one run are patched into another that differs in a single digit.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import tenterhook as th

DIGITS, LENGTH, HEADS, WIDTH = 10, 8, 2, 32
SIZE = WIDTH // HEADS


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(z.transpose(1, 2).flatten(-2))  # the input of `out` holds the heads side by side


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Pointer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(DIGITS + LENGTH, WIDTH), nn.Embedding(LENGTH + 1, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, DIGITS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight
        return self.head(self.blocks(x)[:, -1])


def batch(size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    digits = torch.randint(DIGITS, (size, LENGTH), generator=generator)
    place = torch.randint(LENGTH, (size, 1), generator=generator)
    return torch.cat([digits, DIGITS + place], 1), digits.gather(1, place)[:, 0]


def train(steps: int) -> Pointer:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = Pointer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        tokens, answers = batch(64, generator)
        optimizer.zero_grad()
        F.cross_entropy(model(tokens), answers).backward()
        optimizer.step()
    return model.eval()


def quality(model: nn.Module, tokens: torch.Tensor, answers: torch.Tensor) -> str:
    with torch.no_grad():
        logits = model(tokens)
    right = (logits.argmax(-1) == answers).float().mean().item()
    return f"accuracy {right:.3f}  loss {F.cross_entropy(logits, answers).item():.4f}"


def main(steps: int, picture: Path | None) -> None:
    model = train(steps)
    tokens, answers = batch(1000, torch.Generator().manual_seed(1))
    print(f"as trained                    {quality(model, tokens, answers)}")

    for layer in range(2):
        for heads in ([0], [1], [0, 1]):
            places = [place for head in heads for place in range(head * SIZE, (head + 1) * SIZE)]
            with th.edit(model).input(f"blocks.{layer}.attention.out", th.edits.zero(dim=-1, index=places)):
                name = " and ".join(map(str, heads))
                print(f"block {layer} without head {name:8} {quality(model, tokens, answers)}")

    clean_tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, DIGITS + 4]])  # asks for the digit at place 4: 5
    corrupt_tokens = torch.tensor([[1, 2, 3, 4, 9, 6, 7, 8, DIGITS + 4]])
    with th.record(model, tensors=True) as clean, torch.no_grad():
        model(clean_tokens)

    def metric(logits: torch.Tensor) -> torch.Tensor:
        return logits[0, 5] - logits[0, 9]

    for approximate in (False, True):
        sweep = th.patch_sweep(
            model, corrupt_tokens, clean, None, ["tokens", "blocks.*"], metric, approximate=approximate, batch=9
        )
        print(sweep)
        if picture and not approximate:
            picture.write_text(sweep.svg(), "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--picture", type=Path, help="write the exact sweep's heat map there, as SVG")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.picture)
