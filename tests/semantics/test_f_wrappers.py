"""Section F, row 15: under wrappers of all kinds plain names resolve, and what cannot be seen is told."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import tenterhook as th
from tests.semantics.asking import forward_paths, ignore, make_net, missing
from tests.semantics.wrapping import IDS, WRAPPERS, compiled

pytestmark = pytest.mark.usefixtures("loaded_compiler")

PLAIN = ["", "0", "1", "2"]


# ---- row 15: names ----


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrap", WRAPPERS, ids=IDS)
def test_plain_names_resolve(wrap: Callable[[nn.Module], Any]) -> None:
    """Row 15: '0' on plain, compiled, DataParallel, DDP, both, and EMA; forward, tensor, parameter and backward hooks fire."""
    wrapped = wrap(make_net())
    with th.hooks(wrapped) as hooks:
        handles = [
            hooks.forward("0", ignore),
            hooks.backward("0", ignore),
            hooks.backward_pre("0", ignore),
            hooks.param_grad("0.weight", ignore),
        ]
        wrapped(torch.ones(1, 2)).sum().backward()
    assert [handle.paths for handle in handles] == [["0"], ["0"], ["0"], ["0.weight"]]
    assert [handle.fired for handle in handles] == [1, 1, 1, 1]
    assert str(hooks).startswith("hooks on Sequential\n")


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrap", WRAPPERS, ids=IDS)
def test_recordings_with_and_without_wrappers_are_alike(wrap: Callable[[nn.Module], Any]) -> None:
    """Row 15: one record for each module, under the same model, path and type; the raw name is kept."""
    wrapped = wrap(make_net())
    with th.record(wrapped) as rec:
        wrapped(torch.ones(1, 2)).sum().backward()
    assert forward_paths(rec) == PLAIN
    assert [call.path for call in rec.order() if call.phase == "backward"] == ["", "2", "1", "0"]
    rows = rec.table("modules").to_pylist()
    assert [(row["model"], row["path"], row["type"]) for row in rows] == [
        ("Sequential", path, kind) for path, kind in zip(PLAIN, ["Sequential", "Linear", "ReLU", "Linear"], strict=True)
    ]
    raw = {id(module): name for name, module in wrapped.named_modules()}
    assert all(row["raw_path"].endswith(row["path"]) for row in rows)
    assert set(raw.values()) >= {row["raw_path"] for row in rows}
    assert rec.coverage.complete


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("pattern", ["**", "*", "0,2", "type:Linear", "[02]", "re:[02]", "!1"])
def test_patterns_mean_the_same_on_wrapped_and_plain_models(pattern: str) -> None:
    """Row 15, same kind: globs, types, regular expressions and excludes."""
    net = make_net()
    with th.hooks(net) as hooks:
        plain = hooks.forward(pattern, ignore).paths
    for wrap in WRAPPERS[1:]:
        with th.hooks(wrap(make_net())) as hooks:
            assert hooks.forward(pattern, ignore).paths == plain


@pytest.mark.parametrize("raw", ["_orig_mod.module.0", "_orig_mod.module.*.0", "_orig_mod.module"])
def test_raw_names_resolve_too(raw: str) -> None:
    """Row 15, same kind: names copied from a state dict or a traceback."""
    net = compiled(nn.DataParallel(nn.Sequential(make_net(), nn.Sequential(nn.ReLU()))))
    with th.hooks(net) as hooks:
        paths = hooks.forward(raw, ignore).paths
    assert paths == {"_orig_mod.module.0": ["0"], "_orig_mod.module.*.0": ["0.0", "1.0"], "_orig_mod.module": [""]}[raw]


def test_a_wrapper_in_the_middle_bears_no_name() -> None:
    """Row 15, same kind: activation checkpointing wraps blocks; a user's own attribute 'module' stays."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    class Own(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x)

    model = nn.Sequential(checkpoint_wrapper(make_net()), Own(nn.Linear(2, 2)))
    with th.record(model) as rec:
        model(torch.ones(1, 2)).sum().backward()
    assert forward_paths(rec) == ["", "0", "0.0", "0.1", "0.2", "1", "1.module"]


# ---- other wrappers ----


def test_patched_forwards_as_accelerate_does_them() -> None:
    """Row 15, same kind: an instance's forward that wraps the old one is called, and left as it is."""
    hooks_module = pytest.importorskip("accelerate.hooks")

    class AddOne(hooks_module.ModelHook):
        def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
            return output + 1

    model, plain = make_net(), make_net()
    hooks_module.add_hook_to_module(model[0], AddOne())
    patched = model[0].forward
    with th.record(model, kinds=["input", "output"], tensors=True) as rec:
        out = model(torch.ones(1, 2))
    assert forward_paths(rec) == PLAIN
    assert torch.equal(rec["0"].output, plain[0](torch.ones(1, 2)) + 1)
    assert torch.equal(rec["2"].output, out)
    assert rec["0"].input["input"].tolist() == [[1, 1]]
    assert model[0].forward is patched


class Lora(nn.Module):
    """What PEFT's layers are: they hold the layer that they change."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(2, 1, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(1, 2, bias=False)})

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def test_adapters_are_modules_of_their_own() -> None:
    """Row 15, same kind: base_layer and adapters are seen apart; the frozen base is told."""
    model = make_net()
    model.requires_grad_(False)
    model[0] = Lora(model[0])  # type: ignore[assignment]
    with th.record(model, kinds=["output", "grad_output", "param_grad"]) as rec:
        model(torch.ones(1, 2)).sum().backward()
    assert forward_paths(rec) == ["", "0", "0.base_layer", "0.lora_A.default", "0.lora_B.default", "1", "2"]
    gradients = {row["path"] for row in rec.table("values").to_pylist() if row["kind"] == "param_grad"}
    assert gradients == {"0.lora_A.default", "0.lora_B.default"}
    assert missing(rec) == {
        "0.base_layer": "no gradient: requires_grad=False",
        "2": "no gradient of weight, bias: requires_grad=False",
    }


def test_the_real_peft() -> None:
    """Row 15, same kind: a model wrapped by PEFT; what is passed by on its way is told."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(make_net(), peft.LoraConfig(r=2, target_modules=["0"]))
    with th.record(model, "**.lora_A.*, **.base_layer, base_model") as rec:
        model(torch.ones(1, 2)).sum().backward()
    assert [path.rpartition("model.")[2] for path in forward_paths(rec)] == ["0.base_layer", "0.lora_A.default"]
    assert missing(rec)["base_model"].startswith("never called itself, only modules inside it")


@pytest.mark.parametrize("way", ["weight_norm", "spectral_norm", "orthogonal", "prune"])
def test_parametrised_layers(way: str) -> None:
    """Row 15, same kind: the layer keeps its path, its parameters' new names and gradients are seen, values do not change."""

    def make() -> nn.Sequential:
        model = make_net().eval()
        if way == "prune":
            prune.l1_unstructured(model[0], "weight", 0.5)
        else:
            getattr(parametrizations, way)(model[0])
        return model

    model, plain = make(), make()
    plain(torch.ones(1, 2)).sum().backward()
    with th.record(model, "0, 0.**" if way != "prune" else "0", kinds=["output", "param_grad"]) as rec:
        model(torch.ones(1, 2)).sum().backward()
    seen = {
        f"{row['path']}.{row['slot']}": row for row in rec.table("values").to_pylist() if row["kind"] == "param_grad"
    }
    expected = {name: p.grad for name, p in plain.named_parameters() if name.startswith("0.")}
    assert set(seen) == set(expected)
    for name, gradient in expected.items():
        assert gradient is not None
        assert seen[name]["absmax"] == gradient.abs().max().item()
    with th.hooks(model) as hooks:
        assert hooks.forward("type:Linear", ignore).paths == ["0", "2"]


def test_stateless_calls() -> None:
    """Row 15, same kind: functional_call swaps the parameters in for one call; the swapped ones get the gradients."""
    model = make_net()
    weights = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    with th.record(model, tensors=True) as rec:
        torch.func.functional_call(model, weights, (torch.ones(1, 2),)).sum().backward()
    assert forward_paths(rec) == PLAIN
    assert rec["0"].grad_output is not None
    assert all(parameter.grad is None for parameter in model.parameters())
    assert rec.coverage.complete


@pytest.mark.parametrize("batched", [False, True], ids=["grad", "vmap(grad)"])
def test_functional_transforms(batched: bool) -> None:
    """Row 15, same kind: values under torch.func are recorded, and results do not change."""
    model = make_net()
    weights = {name: value.detach() for name, value in model.named_parameters()}

    def loss(weights: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x,)).sum()

    run: Any = torch.func.grad(loss)
    x = torch.ones(2)
    if batched:
        run, x = torch.func.vmap(run, (None, 0)), torch.tensor([[1.0, 1], [3, 3], [5, 5]])
    expected = run(weights, x)
    with th.record(model, tensors=True, on_error="raise") as rec:
        actual = run(weights, x)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert forward_paths(rec) == PLAIN
    rows = [row for row in rec.table("values").to_pylist() if row["path"] == "" and row["kind"] == "input"]
    assert [(row["shape"], row["mean"], row["absmax"]) for row in rows] == [
        ([2], 3.0, 5.0) if batched else ([2], 1.0, 1.0)
    ]
    assert rec["2"].grad_output.unique().tolist() == [1]


def test_autocast() -> None:
    """Row 15, same kind: dtypes are those that ran; nothing is cast by looking."""
    model = make_net()
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(torch.ones(1, 2))
        with th.record(model, kinds=["input", "output", "grad_output"]) as rec:
            out = model(torch.ones(1, 2))
            out.sum().backward()
    assert torch.equal(out, plain)
    dtypes = {(row["kind"], row["path"]): row["dtype"] for row in rec.table("values").to_pylist()}
    assert dtypes["input", "0"] == "float32"
    assert {dtypes["output", path] for path in PLAIN} == {dtypes["grad_output", "0"]} == {"bfloat16"}


def test_quantised_modules() -> None:
    """Row 15, same kind: dynamically quantised layers are seen; what holds their weights is told."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(make_net().eval(), {nn.Linear}, torch.qint8)
        with th.record(model, kinds=["input", "output"], tensors=True) as rec:
            out = model(torch.ones(1, 2))
    assert forward_paths(rec) == PLAIN
    assert torch.equal(rec["2"].output, out)
    reason = "weights used without calling the module: it holds those of a quantised one"
    assert missing(rec) == {"0._packed_params": reason, "2._packed_params": reason}
