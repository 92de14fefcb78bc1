"""Section A, rows 18, 19, 60: what runs is no longer, or never was, the module that was hooked."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.errors import UnsupportedError
from tenterhook.request import KINDS
from tests.semantics.asking import (
    NOT_CALLED,
    ONLY_INSIDE,
    Encoder,
    forward_paths,
    ignore,
    make_net,
    missing,
    seen_and_told,
    why,
)

# ---- row 60: replaced modules ----


def test_a_replaced_module_is_told() -> None:
    """Row 60: net[0] = ...: the hook waits on the old one."""
    model = make_net()
    with th.record(model) as rec, th.hooks(model) as hooks:
        handle = hooks.forward("**", ignore)
        model[0] = nn.Linear(2, 2)
        model(torch.ones(1, 2))
        text = "module at '0' is no longer the one hooked: it was replaced"
        assert why(hooks) == {"0": text}
    assert missing(rec)["0"] == text
    assert why(hooks) == {"0": text}
    assert handle.fired == 3


@pytest.mark.parametrize(("select", "told"), [(None, True), ("**", True), ("type:Tanh", True), ("0", False)])
def test_a_module_that_was_added_is_told_where_it_is_selected(select: str | None, told: bool) -> None:
    """Row 60, same kind: no hook waits on what comes during the session."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with th.record(model, select) as rec:
        model.append(nn.Tanh())
        model(torch.ones(1, 2))
    text = "added to the model during the session, without hooks: begin the session after it"
    assert missing(rec).get("2") == (text if told else None)


def test_parametrizations_that_were_added_are_told() -> None:
    """Row 60, same kind: torch puts modules of its own in, and calls the old one by another class."""
    model = make_net()
    with th.record(model) as rec:
        nn.utils.parametrizations.weight_norm(model[0])
        model(torch.ones(1, 2))
    assert "added to the model during the session" in missing(rec)["0.parametrizations.weight.0"]


def test_a_module_that_was_removed_is_told() -> None:
    """Row 60, same kind: deleted, with all that is in it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    with th.record(model) as rec, th.hooks(model) as hooks:
        hooks.forward("**", ignore)
        del model[1]
        model(torch.ones(1, 2))
    assert missing(rec)["1.0"] == "module at '1.0' is no longer part of the model"
    assert why(hooks)["1"] == "module at '1' is no longer part of the model"


def test_a_module_replaced_after_it_fired_is_told() -> None:
    """Row 60, same kind: converted in the middle of the session, as quantisation does it; what was seen stays."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with th.record(model) as rec, th.hooks(model) as hooks:
        handle = hooks.forward("0", ignore)
        model(torch.ones(1, 2))
        model[0] = nn.Identity()
        model(torch.ones(1, 2))
        assert "no longer the one hooked" in str(hooks)
    assert forward_paths(rec).count("0") == handle.fired == 1
    assert missing(rec)["0"] == "module at '0' is no longer the one hooked: it was replaced"


def test_a_sliced_sequential_is_told() -> None:
    """Row 60: a slice keeps the hooks of the children and drops the root's."""
    model = make_net()
    paths, told = seen_and_told(model, lambda: model[:2](torch.ones(1, 2)))
    assert paths == ["0", "1"]
    assert told == {"(root)": ONLY_INSIDE, "2": NOT_CALLED}


def test_hooks_that_somebody_else_removed_are_told() -> None:
    """Row 60, same kind: dead handles are silent in torch."""
    model = make_net()
    with th.record(model) as rec, th.hooks(model) as hooks:
        handle = hooks.forward("1", ignore)
        model[1]._forward_hooks.clear()
        model[1]._forward_pre_hooks.clear()
        model(torch.ones(1, 2))
        assert not handle.live
        assert why(hooks) == {"1": "hooks were removed by somebody else"}
    assert missing(rec)["1"] == why(hooks)["1"] == "hooks were removed by somebody else"


# ---- row 18: TorchScript ----


@pytest.fixture
def old_script() -> Any:
    """TorchScript, whose deprecation torch warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield torch.jit


@pytest.mark.parametrize("session", [th.record, th.hooks])
def test_script_modules_are_refused(old_script: Any, session: Callable[[Any], Any]) -> None:
    """Row 18: torch refuses some hooks on them and accepts others that never fire, as on seq[0]; here one clear error."""
    scripted = old_script.script(make_net())
    traced = old_script.trace(make_net(), torch.ones(1, 2))
    for model in (scripted, getattr(scripted, "0"), traced, old_script.freeze(scripted.eval())):
        with pytest.raises(UnsupportedError, match=r"(?s)script module.*before torch\.jit"):
            session(model)


def test_what_indexing_a_script_gives_is_told(old_script: Any) -> None:
    """Row 18: seq[0] is no part of the script but the module it was made from, which may well be in use; so D, not P."""
    model = make_net()
    scripted = old_script.script(model)
    assert scripted[0] is model[0]
    reason = "never called: it was made into a script, which runs no hooks (scripted[0] gives this original)"
    assert seen_and_told(scripted[0], lambda: scripted(torch.ones(1, 2))) == ([], {"(root)": reason})
    assert seen_and_told(model, lambda: model(torch.ones(1, 2))) == (["", "0", "1", "2"], {})


def test_a_script_module_inside_a_model_is_refused(old_script: Any) -> None:
    """Row 18, same kind: the error names where it is."""
    with pytest.raises(UnsupportedError, match="module '1' is a script module"):
        th.record(nn.Sequential(nn.Linear(2, 2), old_script.script(nn.ReLU())))


def test_a_script_function_is_refused(old_script: Any) -> None:
    """Row 18, same kind."""
    with pytest.raises(UnsupportedError, match="script function"):
        th.hooks(old_script.trace(lambda x: x * 2, torch.ones(1)))


def test_tracing_inside_a_session_records_what_ran_and_leaves_nothing(old_script: Any) -> None:
    """Row 18, same kind: the trace runs the model, and the traced module has no hooks of ours."""
    model = make_net()
    with th.record(model, "0") as rec:
        traced = old_script.trace(model, torch.ones(1, 2), check_trace=False)
    assert forward_paths(rec) == ["0"]
    assert torch.equal(traced(torch.ones(1, 2)), model(torch.ones(1, 2)))


@pytest.mark.parametrize("options", [{}, {"tensors": True}, {"kinds": KINDS}, {"ops": True}], ids=str)
def test_a_trace_that_is_made_inside_a_session_is_that_of_the_bare_model(
    old_script: Any, options: dict[str, Any]
) -> None:
    """Row 18, same kind: what recording does stays out of the graph, and torch's own check of the trace passes."""
    model = make_net()
    bare = str(old_script.trace(model, torch.ones(1, 2)).inlined_graph)
    with th.record(model, **options) as rec:
        traced = old_script.trace(model, torch.ones(1, 2))
    assert nodes(str(traced.inlined_graph)) == nodes(bare)
    assert rec["0"].calls[0].values[-1].statistics["numel"] is not None
    assert rec.recording.manifest.partial is None


def nodes(graph: str) -> list[str]:
    """The operations of a graph, without the names that torch gives values by the lines they come from."""
    return re.findall(r"(?:aten|prim)::\w+", graph)


# ---- row 19: fx ----


class Inlined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = Encoder()
        self.c = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(x))


def test_a_graph_module_is_hooked_where_its_graph_calls() -> None:
    """Row 19: hooks fire at each node that calls a leaf; what was traced through is told."""
    graph = torch.fx.symbolic_trace(Inlined())
    paths, told = seen_and_told(graph, lambda: graph(torch.ones(1, 2)))
    assert paths == ["", "b.l", "c"]
    assert told == {"b": "inlined by fx: the graph calls modules inside it, not itself"}


def test_an_edit_of_the_root_of_a_graph_module_applies() -> None:
    """Row 19: eager and fx differ by 100 where torch drops the root's hook; put on the graph module it applies."""
    model = Inlined()
    graph = torch.fx.symbolic_trace(model)
    x = torch.ones(1, 2)
    with th.hooks(graph) as hooks:
        hooks.forward("", lambda module, args, output: output + 100)
        assert torch.equal(graph(x), model(x) + 100)


@pytest.mark.usefixtures("loaded_compiler")
def test_an_exported_program_is_told() -> None:
    """Row 19, same kind: torch.export inlines every layer."""
    exported = torch.export.export(make_net(), (torch.ones(1, 2),), strict=False)
    with pytest.raises(UnsupportedError, match=r"exported\.module\(\)"):
        th.record(exported)
    model = exported.module()
    with th.record(model) as rec:
        model(torch.ones(1, 2))
    assert "" in forward_paths(rec)
    assert {path: missing(rec)[path] for path in ("0", "2")} == dict.fromkeys(
        ("0", "2"), "inlined by fx: the graph does not call it"
    )


def test_a_graph_module_inside_a_model_is_told() -> None:
    """Row 19, same kind: the names of what was traced through are those in the whole model."""
    model = nn.Sequential(torch.fx.symbolic_trace(Inlined()), nn.ReLU())
    paths, told = seen_and_told(model, lambda: model(torch.ones(1, 2)))
    assert paths == ["", "0", "0.b.l", "0.c", "1"]
    assert list(told) == ["0.b"]


@pytest.mark.usefixtures("loaded_compiler")
def test_strict_export_in_a_session_is_right_or_refused_by_torch() -> None:
    """Row 19, same kind: it compiles what a session has run eager, which some versions of torch refuse; nothing is left."""
    model = make_net()
    x = torch.ones(1, 2)
    torch._dynamo.reset()  # torch 2.6 exports nothing strictly once something was compiled
    programs: list[Any] = []
    with th.record(model) as rec, contextlib.suppress(torch._dynamo.exc.TorchDynamoException, AssertionError):
        programs.append(torch.export.export(model, (x,), strict=True))
    assert rec.recording.manifest.partial is None
    torch._dynamo.reset()
    programs.append(torch.export.export(model, (x,), strict=True))
    assert all(torch.equal(program.module()(x), model(x)) for program in programs)


@pytest.mark.usefixtures("loaded_compiler")
def test_tracing_in_a_session_gives_a_graph_without_our_hooks() -> None:
    """Row 19, same kind: symbolic tracing and export of a hooked model."""
    model = make_net()
    with th.record(model) as rec:
        graph = torch.fx.symbolic_trace(model)
        program = torch.export.export(model, (torch.ones(1, 2),), strict=False)
    x = torch.randn(1, 2)
    assert torch.equal(graph(x), model(x))
    assert torch.equal(program.module()(x), model(x))
    assert rec.recording.manifest.partial is None


@pytest.mark.usefixtures("loaded_compiler")
@pytest.mark.parametrize("kinds", [["output"], ["grad_input"], ["update"], ["input", "param", "param_grad", "update"]])
def test_the_graph_of_an_export_in_a_session_is_the_bare_one(kinds: list[str]) -> None:
    """Row 19, same kind: nothing that a recording computes becomes a node, aliases of inputs and copies of parameters included."""
    model = make_net()
    x = torch.ones(1, 2)
    bare = torch.export.export(model, (x,), strict=False).graph_module.code
    with th.record(model, kinds=kinds, on_error="raise"):
        assert torch.export.export(model, (x,), strict=False).graph_module.code == bare
    assert torch.export.export(model, (x,), strict=False).graph_module.code == bare
