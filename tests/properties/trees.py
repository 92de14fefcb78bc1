"""Random module trees, made by hypothesis, with what makes hooks fail."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 4


class Boom(Exception):
    """Raised where a tree says so."""


@dataclass
class Packed:
    """An output that is no pytree."""

    value: Tensor
    rest: list[Any]


class Named(NamedTuple):
    """A tuple with names."""

    value: Tensor
    rest: Any


def _wrap(form: str, value: Tensor) -> Any:
    return {
        "tensor": lambda: value,
        "tuple": lambda: (value, None),
        "nested": lambda: ((value, 1), [value.detach()]),
        "dict": lambda: {"value": value, "twice": value * 2},
        "ordered": lambda: OrderedDict(value=value),
        "named": lambda: Named(value, {"k": value + 1}),
        "dataclass": lambda: Packed(value, [value]),
    }[form]()


def _unwrap(out: Any) -> Tensor:
    while not isinstance(out, Tensor):
        if isinstance(out, dict):
            out = out["value"]
        elif isinstance(out, Packed):
            out = out.value
        else:
            out = out[0]
    return out


class Functional(nn.Module):
    """No parameters; a functional op, in place or not, or a region of another kind."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        if self.op == "relu_":
            return torch.relu_(x.clone())
        if self.op == "view":
            return x.view(-1).view_as(x)
        if self.op == "no_grad":
            with torch.no_grad():
                return torch.tanh(x)
        if self.op == "identity":
            return x
        if self.op == "random":
            return x + torch.rand_like(x)
        return torch.sigmoid(x)


class Raising(nn.Module):
    """Raises at its n-th call."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at:
            raise Boom(f"call {self.calls}")
        return x * 1.5


class Branch(nn.Module):
    """Calls its children one after another, some of them again, in one of several styles."""

    def __init__(self, children: list[nn.Module], form: str, style: str, repeat: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(children)
        self.form, self.style, self.repeat = form, style, repeat

    def _body(self, x: Tensor) -> Tensor:
        for part in [*self.parts, *(self.parts[:1] if self.repeat else ())]:
            x = _unwrap(part(x, scale=torch.ones(())) if isinstance(part, Branch) else part(x))
        return x

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Any:
        if self.style.startswith("checkpoint") and torch.is_grad_enabled() and x.requires_grad:
            y: Any = checkpoint(self._body, x, use_reentrant=self.style == "checkpoint reentrant")
        else:
            y = self._body(x)
        if self.style == "residual":
            y = torch.nn.functional.gelu(y) + x.mean()
        elif self.style == "in place":
            y = (y * 1.0).add_(1)
        return _wrap(self.form, y if scale is None else y * scale)


def _linear(frozen: bool) -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    return layer.requires_grad_(not frozen)


LEAVES = {
    "linear": lambda: _linear(False),
    "frozen": lambda: _linear(True),
    "relu in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    "dropout": lambda: nn.Dropout(0.3),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    **{op: (lambda op=op: Functional(op)) for op in ("relu_", "view", "no_grad", "identity", "random", "sigmoid")},
}

FORMS = ["tensor", "tuple", "nested", "dict", "ordered", "named", "dataclass"]
STYLES = ["plain", "plain", "residual", "in place", "checkpoint", "checkpoint reentrant"]


class Spec(NamedTuple):
    """A tree as plain data: what hypothesis shrinks, and what two equal models are built from."""

    kind: str
    children: tuple[Any, ...] = ()
    form: str = "tensor"
    style: str = "plain"
    repeat: bool = False
    share: bool = False


def specs(styles: list[str] = STYLES) -> st.SearchStrategy[Spec]:
    """Trees of at most some nine leaves."""
    leaf = st.sampled_from(sorted(LEAVES)).map(Spec)

    def branch(inner: st.SearchStrategy[Spec]) -> st.SearchStrategy[Spec]:
        return st.builds(
            Spec,
            st.just("branch"),
            st.lists(inner, min_size=1, max_size=3).map(tuple),
            st.sampled_from(FORMS),
            st.sampled_from(styles),
            st.booleans(),
            st.booleans(),
        )

    return branch(st.recursive(leaf, branch, max_leaves=6))


def build(spec: Spec, *, raise_at: int = 0) -> nn.Module:
    """Make the module of a spec, the same each time; ``raise_at`` puts in a module that raises at that call."""
    torch.manual_seed(3)
    made = _build(spec)
    if raise_at:
        made.parts.append(Raising(raise_at))
    return made


def _build(spec: Spec) -> Any:
    if spec.kind != "branch":
        return LEAVES[spec.kind]()
    children = [_build(child) for child in spec.children]
    if spec.share:
        children.append(children[0])
    return Branch(children, spec.form, spec.style, spec.repeat)


def unwrap(out: Any) -> Tensor:
    """Give the tensor that a tree's output is about."""
    return _unwrap(out)
