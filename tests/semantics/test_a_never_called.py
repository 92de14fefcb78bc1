"""Section A, rows 04, 05, 37, 38: modules that run without being called, or not at all; the reason is told."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tenterhook as th
from tenterhook.errors import SelectionError
from tests.semantics.asking import (
    BY_GRADIENT,
    NOT_CALLED,
    ONLY_INSIDE,
    Encoder,
    forward_paths,
    ignore,
    missing,
    seen_and_told,
)

# ---- row 04: fused transformer layers ----


def make_encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()


def test_modules_in_a_fused_encoder_are_seen() -> None:
    """Row 04: in eval and no_grad the fused path calls no submodule; here self_attn and linear1 are recorded once each."""
    encoder, x = make_encoder(), torch.randn(2, 3, 8)
    with torch.no_grad():
        fused = encoder(x)
        with th.record(encoder) as rec:
            recorded = encoder(x)
            assert not torch.backends.mha.get_fastpath_enabled()
    paths = forward_paths(rec)
    assert [paths.count(f"layers.{i}.{name}") for i in (0, 1) for name in ("self_attn", "linear1")] == [1, 1, 1, 1]
    torch.testing.assert_close(recorded, fused)
    assert torch.backends.mha.get_fastpath_enabled()
    assert any("fused transformer path off" in sentence for sentence in rec.told)


def test_the_fused_path_is_on_again_after_an_exception() -> None:
    """Row 04: the switch has its old value on exit and on exception."""
    encoder = make_encoder()
    with pytest.raises(KeyError), th.hooks(encoder):
        raise KeyError
    assert torch.backends.mha.get_fastpath_enabled()
    first, second = th.hooks(encoder), th.hooks(encoder)
    first.close()
    assert not torch.backends.mha.get_fastpath_enabled()
    second.close()
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_switch_that_the_user_has_off_stays_off() -> None:
    """Row 04, same kind: the old value may be off."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with th.record(make_encoder()) as rec:
            pass
        assert not torch.backends.mha.get_fastpath_enabled()
        assert not any("fused" in sentence for sentence in rec.told)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_a_single_fused_layer_with_a_replaced_forward() -> None:
    """Row 04, same kind: an instance's own forward is never called on the fused path."""
    layer = make_encoder().layers[0]
    linear: Any = layer.linear1
    calls: list[tuple[int, ...]] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(x.shape))
        return F.linear(x, linear.weight, linear.bias)

    linear.forward = forward
    with torch.inference_mode(), th.record(layer) as rec:
        layer(torch.randn(2, 3, 8))
    assert calls == [(2, 3, 8)]
    assert forward_paths(rec).count("linear1") == 1


def test_fused_keep_changes_no_bit_and_tells() -> None:
    """Row 04, same kind: whoever wants the fused path keeps it, and is told what was not seen for that."""
    model = nn.Sequential(nn.Linear(8, 8), make_encoder()).eval()
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        fused = model(x)
        with th.record(model, fused="keep", stats=None) as rec:
            assert torch.equal(model(x), fused)
    assert forward_paths(rec) == ["", "0", "1"]
    reason = "left closed by fused='keep': a hook on it would end the fused path"
    assert missing(rec)["1.layers.0"] == missing(rec)["1.layers.1.norm2"] == reason


# ---- row 05: weights that are used without a call ----


@pytest.mark.parametrize("training", [True, False])
def test_out_proj_is_told(training: bool) -> None:
    """Row 05: nn.MultiheadAttention reads out_proj's weight."""
    mha = nn.MultiheadAttention(8, 2, batch_first=True).train(training)
    x = torch.randn(2, 3, 8)
    paths, told = seen_and_told(mha, lambda: mha(x, x, x))
    assert paths == [""]
    assert told == {"out_proj": "weights used without calling the module"}


def test_a_tied_head_is_told() -> None:
    """Row 05, same kind: logits from the embedding's weight; the head that owns it too is never called."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(self.emb(x), self.emb.weight)

    model = Tied()
    paths, told = seen_and_told(model, lambda: model(torch.tensor([1, 2])).sum().backward())
    assert paths == ["", "emb"]
    assert told == {"head": "never called: its weights are also those of 'emb', which was"}


class Direct(nn.Module):
    """Uses the weights of a layer, and not the layer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.unused = nn.Linear(2, 2)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "functional":
            return F.linear(x, self.layer.weight)
        if self.how == "matmul":
            return x @ self.layer.weight.T
        return self.layer.forward(x)


@pytest.mark.parametrize("how", ["functional", "matmul", ".forward"])
@pytest.mark.parametrize("cleared", [True, False])
def test_weights_that_got_a_gradient_are_told(how: str, cleared: bool) -> None:
    """Row 05, same kind: any layer, told by the gradients of its parameters, also where those are cleared afterwards."""
    model = Direct(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # left over from before the session: says nothing
    with th.record(model) as rec:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if cleared:
            optimizer.zero_grad()
    assert forward_paths(rec) == [""]
    assert missing(rec) == {"layer": BY_GRADIENT, "unused": NOT_CALLED}


# ---- row 37: past the call ----


@pytest.mark.parametrize(
    ("style", "paths", "told"),
    [
        (lambda m, x: m(x), ["", "l"], {}),
        (lambda m, x: m.forward(x), ["l"], {"(root)": ONLY_INSIDE}),
        (lambda m, x: m.l.forward(x), [], {"(root)": NOT_CALLED, "l": NOT_CALLED}),
        (lambda m, x: F.linear(x, m.l.weight), [], {"(root)": NOT_CALLED, "l": NOT_CALLED}),
        (lambda m, x: m.encode(x), ["l"], {"(root)": ONLY_INSIDE}),
    ],
    ids=["call", "forward", "layer.forward", "functional", "method"],
)
def test_five_styles_of_calling(style: Callable[..., Any], paths: list[str], told: dict[str, str]) -> None:
    """Row 37: the five styles fire exactly these; the root is told as not called in style 2 and 5."""
    model, x = Encoder(), torch.ones(1, 2)
    assert seen_and_told(model, lambda: style(model, x)) == (paths, told)


def test_a_part_whose_forward_is_called_directly() -> None:
    """Row 37, same kind: a block in the middle; what is in it is seen, itself not."""
    block = Encoder()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block.forward(x)

    model = Net()
    assert seen_and_told(model, lambda: model(torch.ones(1, 2))) == (["", "block.l"], {"block": ONLY_INSIDE})


def test_forward_of_a_layer_in_training() -> None:
    """Row 37, same kind: with a backward pass the layer's gradients tell that it ran."""
    model = Encoder()
    paths, told = seen_and_told(model, lambda: model.l.forward(torch.ones(1, 2)).sum().backward())
    assert paths == []
    assert told == {"(root)": NOT_CALLED, "l": BY_GRADIENT}


# ---- row 38: containers, unused layers ----


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ml = nn.ModuleList([nn.Linear(2, 2)])
        self.md = nn.ModuleDict({"a": nn.Linear(2, 2)})
        self.unused = nn.Linear(2, 2)
        self.p = nn.ParameterList([nn.Parameter(torch.ones(2))])
        self.empty = nn.ModuleList()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.md["a"](self.ml[0](x)) * self.p[0]


def test_containers_are_no_part_of_what_is_expected() -> None:
    """Row 38: counts are 1 for the root, ml.0 and md.a; the unused layer is told, containers are not expected."""
    model = Lists()
    assert seen_and_told(model, lambda: model(torch.ones(1, 2))) == (["", "ml.0", "md.a"], {"unused": NOT_CALLED})


@pytest.mark.parametrize(
    ("name", "advice"),
    [("ml", "'ml.*'"), ("md", "'md.*'"), ("p", "no modules in it"), ("empty", "no modules in it"), ("m[ld]", "'ml.*'")],
)
@pytest.mark.parametrize("session", ["record", "forward", "backward"])
def test_a_container_is_refused_by_name(name: str, advice: str, session: str) -> None:
    """Row 38: a hook on it would wait in vain; the error suggests what is in it."""
    model = Lists()
    with pytest.raises(SelectionError, match="never called") as caught, th.hooks(model) as hooks:
        if session == "record":
            th.record(model, name)
        else:
            getattr(hooks, session)(name, ignore)
    assert advice in str(caught.value)


def test_a_container_with_a_forward_of_its_own_is_a_module() -> None:
    """Row 38, same kind: a ModuleList that can be called is."""

    class Chain(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for module in self:
                x = module(x)
            return x

    model = nn.Sequential(Chain([nn.Linear(2, 2), nn.ReLU()]))
    assert seen_and_told(model, lambda: model(torch.ones(1, 2))) == (["", "0", "0.0", "0.1"], {})


def test_a_container_as_the_model() -> None:
    """Row 38, same kind: the root itself is never called, what is in it is."""
    model = nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])
    assert seen_and_told(model, lambda: model[1](model[0](torch.ones(1, 2)))) == (["0", "1"], {})


def test_a_branch_that_is_not_taken() -> None:
    """Row 38, same kind: unused for this input only."""

    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.large = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.small(x) if x.sum() < 10 else self.large(x)

    model = Switch()
    told = seen_and_told(model, lambda: model(torch.ones(1, 2)))
    assert told == (["", "small"], {"large": NOT_CALLED, "large.0": NOT_CALLED})
    assert seen_and_told(model, lambda: model(torch.ones(9, 2)))[1] == {"small": NOT_CALLED}


# ---- names ----


@pytest.mark.parametrize("name", ["unused.weight", "p.0", "ml.0.*ias"])
def test_the_name_of_a_parameter_gets_an_answer_of_its_own(name: str) -> None:
    """Bad input: hooking by a name that is a parameter."""
    with pytest.raises(SelectionError, match="name of a parameter") as caught:
        th.record(Lists(), name)
    assert "param_grad(" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "near"), [("unusd", "'unused'"), ("ml.1", "'ml.0'"), ("nothing.like.it", "known are")]
)
def test_an_unknown_name_gets_the_nearest(name: str, near: str) -> None:
    """Bad input: a name that matches nothing; nothing has been put on."""
    model = Lists()
    with th.hooks(model) as hooks:
        with pytest.raises(SelectionError) as caught:
            hooks.forward(["ml.0", name], ignore)
        assert near in str(caught.value)
        assert not any(module._forward_hooks for module in model.modules())


def test_a_predicate_that_raises_leaves_nothing() -> None:
    """Bad input: the user's own error comes out, and no hook is left on."""

    def raising(path: str, module: nn.Module) -> bool:
        return path == "ml" or 1 / 0 > 1

    model = Lists()
    with th.hooks(model) as hooks:
        with pytest.raises(ZeroDivisionError):
            hooks.forward(raising, ignore)
        assert len(hooks) == 0
    with pytest.raises(ZeroDivisionError), th.record(model, raising):
        pass
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# ---- row 04: that the last bits may differ is told where it can be, and nowhere else ----

FUSED_OFF = "fused transformer path off: results may differ in the last bits from the fused ones"


def _run(encoder: nn.Module, *, training: bool) -> None:
    encoder.train(training)
    with contextlib.nullcontext() if training else torch.no_grad():
        encoder(torch.randn(2, 3, 8))


@pytest.mark.parametrize(("modes", "told"), [([True], False), ([False], True), ([True, False, True], True)])
def test_a_recording_tells_that_the_fused_path_was_left(modes: list[bool], told: bool, tmp_path: Path) -> None:
    encoder = make_encoder().train(modes[0])
    with th.record(encoder, to=tmp_path / "run.thk") as rec:
        for training in modes:
            _run(encoder, training=training)
    for recording in (rec.recording, th.open(tmp_path / "run.thk")):
        assert (FUSED_OFF in str(recording.coverage)) == told == (FUSED_OFF in recording.manifest.told)
    assert rec.told.count(FUSED_OFF) == told


def test_hooks_tell_it_once_the_model_is_in_evaluation() -> None:
    encoder = make_encoder().train()
    with th.hooks(encoder) as hooks:
        assert FUSED_OFF not in str(hooks)
        encoder.eval()
        assert str(hooks).count(FUSED_OFF) == 1
    assert str(hooks).count(FUSED_OFF) == 1


@pytest.mark.parametrize(("mode", "told"), [("train", False), ("eval", True)])
def test_a_recorded_script_tells_it_in_its_summary(mode: str, told: bool, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "net = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)\n"
        f"net.{mode}()\n"
        f"with torch.set_grad_enabled({mode == 'train'}):\n    net(torch.ones(2, 3, 8))\n"
    )
    command = [sys.executable, "-m", "tenterhook", "record", "-o", str(tmp_path / "run.thk"), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (FUSED_OFF in " ".join(done.stderr.split())) == told
    assert (FUSED_OFF in th.open(tmp_path / "run.thk").manifest.told) == told
