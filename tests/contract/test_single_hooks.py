"""Single hooks and hooks on functions: the same calls with the same meaning in every framework."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tenterhook as th
from tenterhook.errors import HookError
from tests.contract.adapters.base import Adapter
from tests.contract.nets import X, close, loss_of, mlp, mlp_expected


def child(net: Any) -> Any:
    """The first linear layer of the MLP."""
    return net[0] if hasattr(net, "__getitem__") else getattr(net, "0")


def test_single_hooks_see_what_the_set_sees_and_come_off(fw: Adapter) -> None:
    net, expected, seen = mlp(fw), mlp_expected(), {}
    layer = child(net)
    handles = [
        th.register_forward_pre_hook(layer, lambda module, args: seen.update(input=fw.array(args[0])) and None),
        th.register_forward_hook(layer, lambda module, args, output: seen.update(output=fw.array(output)) and None),
        th.register_backward_pre_hook(layer, lambda module, out: seen.update(grad_output=fw.array(out[0])) and None),
        th.register_backward_hook(layer, lambda module, into, out: seen.update(grad_input=fw.array(into[0])) and None),
    ]
    fw.run(net, loss_of(net), [X], wrt_inputs=True)
    close(seen["input"], X)
    close(seen["output"], expected.outputs["0"])
    close(seen["grad_output"], expected.grad_outputs["0"])
    close(seen["grad_input"], expected.grad_inputs["0"])
    assert [handle.fired for handle in handles] == [1, 1, 1, 1]
    for handle in handles:
        handle.remove()
    seen.clear()
    fw.run(net, loss_of(net), [X], wrt_inputs=True)
    assert seen == {}


def test_a_tensor_hook_scales_a_gradient(fw: Adapter) -> None:
    net, expected = mlp(fw), mlp_expected()

    def scaled(module: Any, args: Any, output: Any) -> None:
        th.register_tensor_hook(output, lambda gradient: gradient * 2)

    with th.register_forward_hook(child(net), scaled):
        run = fw.run(net, loss_of(net), [X])
    close(run.parameters["0.weight"], expected.parameters["0.weight"] * 2)


def test_a_module_is_not_hooked_as_a_function(fw: Adapter) -> None:
    net = mlp(fw)
    name = "construct" if hasattr(net, "construct") else "forward"
    with th.hooks(net) as hooks, pytest.raises(HookError, match=r"hooks\.forward"):
        hooks.after(net, name, lambda *args, **kwargs: None)


def test_modules_can_be_asked_for(fw: Adapter) -> None:
    net = mlp(fw)
    assert [found.path for found in th.select(net, "2*")] == ["2"]
    assert np.shape(fw.array(net(fw.tensor(X)))) == (2, 2)
