"""Sessions of edits in every framework: when they begin and end, what they say of themselves and leave behind."""

from __future__ import annotations

import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenterhook as th
from tenterhook.errors import EditError, HookError, SelectionError
from tests.contract.adapters.base import Adapter
from tests.contract.nets import B0, W0, X, close, loss_of, mlp, net_with


def test_a_recording_holds_the_edits_that_were_made_meanwhile(fw: Adapter, tmp_path: Path) -> None:
    net, other = net_with(fw), net_with(fw)
    with th.edit(other) as elsewhere, th.record(net, to=tmp_path / "r.thk"):
        elsewhere.output("a", th.edits.zero())
        other(fw.tensor(X))
        with th.edit(net) as edit:
            edit.output("a", th.edits.scale(0.5), call=0)
            net(fw.tensor(X))
    assert th.open(tmp_path / "r.thk").manifest.edits == [
        {"kind": "output", "select": "a", "value": "scale(0.5)", "ran": 1, "call": [0]}
    ]


def test_a_recording_holds_the_edits_of_a_model_that_is_gone(fw: Adapter) -> None:
    """What many sessions did in the same way is one entry."""
    net = net_with(fw)
    with th.record(net) as rec:
        for factor in (0.5, 0.5, 2):
            with th.edit(net) as edit:
                edit.output("a", th.edits.scale(factor))
                net(fw.tensor(X))
        del net, edit
        gc.collect()
    said = {"kind": "output", "select": "a"}
    assert rec.recording.manifest.edits == [
        said | {"value": "scale(0.5)", "ran": 2},
        said | {"value": "scale(2)", "ran": 1},
    ]


def test_a_table_of_edits_and_why_they_did_not_run(fw: Adapter) -> None:
    net = fw.module("Net", lambda self, x: self.a(x), a=fw.linear(W0, B0), unused=fw.relu())
    edit = th.edit(net).start()
    edit.output("a", th.edits.scale(0.5))
    edit.output("unused", th.edits.zero())
    edit.output("a", th.edits.zero(), call=3)
    edit.grad_output("a", th.edits.clip_norm(1.0))
    net(fw.tensor(X))
    with pytest.warns(th.TenterhookWarning, match="edits that never ran:\n  unused output zero\\(\\): never called"):
        edit.close()
    lines = [line.split("  ") for line in str(edit).splitlines()]
    rows = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert rows[0] == ["edits on Net"]
    assert rows[2] == ["a", "output", "scale(0.5)", "1"]
    assert rows[3] == ["unused", "output", "zero()", "0", "never called"]
    assert rows[4] == [
        "a",
        "output",
        "zero()",
        "call 3",
        "0",
        "called once, never in call 3",
    ]
    assert rows[5][:4] == ["a", "grad_output", "clip_norm(1.0)", "0"] and "no gradient" in rows[5][4]


def test_an_edit_that_cuts_off_the_graph_is_warned_of(fw: Adapter) -> None:
    net = net_with(fw)
    with th.edit(net) as edit:
        edit.output("a", lambda v: fw.tensor(fw.array(v)))
        with pytest.warns(th.TenterhookWarning, match=r"edit of output of a \(.*\): the new value is detached"):
            run = fw.run(net, loss_of(net), [X])
    assert not np.any(run.parameters.get("a.weight", 0)) and np.any(run.parameters["b.weight"])


def test_what_cannot_be(fw: Adapter) -> None:
    net = mlp(fw)
    with th.edit(net) as edit:
        with pytest.raises(SelectionError):
            edit.output("nowhere", th.edits.zero())
        with pytest.raises(HookError, match="needs a function or an edit value"):
            edit.output("0", 3)
        with pytest.raises(HookError, match=r"fn\(value\) or fn\(value, address\)"):
            edit.output("0", lambda module, args, output: None)
        with pytest.raises(HookError, match="for param_grad only"):
            edit.grad_output("**", th.edits.clip_norm(1.0, together=True))
        with pytest.raises(TypeError, match=r"output\(\) has no keyword 'slots'; there are slot, call, step, allow"):
            edit.output("0", th.edits.zero(), slots="[0]")
        with pytest.raises(SelectionError, match=r"cannot read slot '\[x\]'"):
            edit.output("0", th.edits.zero(), slot="[x]")
        with pytest.raises(HookError, match="count from 0"):
            edit.output("0", th.edits.zero(), call=-1)
        with pytest.raises(HookError, match="count from 0"):
            edit.output("0", th.edits.zero(), call=True)
    with pytest.raises(HookError, match="closed"):
        edit.output("0", th.edits.zero())
    with pytest.raises(EditError, match="go together"):
        th.edits.zero(dim=1)


def test_a_session_of_one_edit_ends_with_its_handle(fw: Adapter) -> None:
    net = mlp(fw)
    plain = fw.array(net(fw.tensor(X)))
    with th.edit(net).output("2", th.edits.scale(2)) as handle:
        close(fw.array(net(fw.tensor(X))), plain * 2)
    np.testing.assert_array_equal(fw.array(net(fw.tensor(X))), plain)
    assert not handle.live and repr(handle.editor).endswith("closed>")
    with th.edit(net).stop("0") as handle:
        net(fw.tensor(X))
        raise AssertionError("not reached")
    assert str(handle.editor.stopped.address) == "0:output#0@0"


def test_nothing_is_put_on_before_the_session_starts(fw: Adapter) -> None:
    net = net_with(fw)
    plain, before = fw.array(net(fw.tensor(X))), what_is_on(net)
    edit = th.edit(net)
    handle = edit.output("a", th.edits.zero())
    bias = edit.param_grad("a.bias", th.edits.zero())
    assert what_is_on(net) == before and not handle.live
    np.testing.assert_array_equal(fw.array(net(fw.tensor(X))), plain)
    assert "not put on: use with th.edit(model) as edit, or edit.start()" in str(edit)
    with pytest.raises(SelectionError):  # at once, not at the start
        edit.output("nowhere", th.edits.zero())
    with edit:
        assert handle.live
        run = fw.run(net, loss_of(net), [X])
        assert (fw.array(net.a(fw.tensor(X))) == 0).all() and not np.any(run.parameters["a.bias"])
    assert (handle.fired, bias.fired) == (2, 1)
    assert what_is_on(net) == before
    with pytest.raises(HookError, match="closed already"):
        edit.start()


def test_an_editor_that_never_started_says_so(fw: Adapter) -> None:
    net = net_with(fw)
    edit = th.edit(net)
    edit.output("a", th.edits.zero())
    with pytest.warns(th.TenterhookWarning, match=r"edits that never ran:\n  a output zero\(\): not put on"):
        edit.close()
    dropped = th.edit(net)
    dropped.output("a", th.edits.zero())
    with pytest.warns(th.TenterhookWarning, match="edits of Net were not put on"):
        del dropped
        gc.collect()
    th.edit(net)
    gc.collect()  # without edits there is nothing to say


@pytest.mark.parametrize("state", ["new", "open", "closed", "stopped"])
def test_an_editor_keeps_no_model_alive(fw: Adapter, state: str) -> None:
    net = net_with(fw)
    edit = th.edit(net)
    edit.output("a", th.edits.scale(2))
    edit.grad_input("b", th.edits.scale(2))
    edit.skip("act", step=1)
    handle = edit.param_grad("a.bias", th.edits.scale(2))
    if state != "new":
        edit.start()
        fw.run(net, loss_of(net), [X])
        fw.array(net(fw.tensor(X)))
    if state == "closed":
        edit.close()
    if state == "stopped":
        edit.stop("b")
        edit.run(net, fw.tensor(X))
        assert edit.stopped is not None
        edit.stopped.value = None  # its graph holds the parameters, which is not ours
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None and len(edit) and handle.rule.kind == "param_grad"
    if state == "new":
        with pytest.raises(HookError, match="the Net that these edits are for is gone\n  keep a reference"):
            edit.start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", th.TenterhookWarning)  # that they never ran
        edit.close()
    assert "Net" in str(edit)


def test_a_session_of_one_call(fw: Adapter) -> None:
    net = net_with(fw)
    plain, before = fw.array(net(fw.tensor(X))), what_is_on(net)
    edit = th.edit(net)
    edit.output("b", th.edits.scale(2))
    close(fw.array(edit.run(net, fw.tensor(X))), plain * 2)
    close(fw.array(th.edit(net).output("b", th.edits.scale(3)).run(net, fw.tensor(X))), plain * 3)
    first = fw.array(net.a(fw.tensor(X)))
    close(fw.array(th.edit(net).stop("a").run(net, fw.tensor(X))), first)
    with pytest.raises(RuntimeError, match="mine"):
        th.edit(net).output("a", raising).run(net, fw.tensor(X))
    assert what_is_on(net) == before


def test_recording_one_call(fw: Adapter) -> None:
    net = net_with(fw)
    expected, before = fw.array(net(fw.tensor(X))), what_is_on(net)
    output, rec = th.record(net, tensors=True).run(net, fw.tensor(X))
    np.testing.assert_array_equal(fw.array(output), expected)
    np.testing.assert_array_equal(fw.array(rec["b"].output), expected)
    assert rec.recording.manifest.complete and what_is_on(net) == before
    with pytest.raises(RuntimeError, match="mine"):
        th.record(net).run(raising, None)
    assert what_is_on(net) == before


def what_is_on(net: Any) -> list[Any]:
    """The attributes of the modules, and how much is in those that hold something."""
    return [
        [(name, len(value) if isinstance(value, (dict, list)) else 0) for name, value in sorted(vars(module).items())]
        for module in (net, net.a, net.act, net.b)
    ]


def raising(value: Any) -> Any:
    raise RuntimeError("mine")
