"""What callbacks of ``th.hooks`` change, and what they may not, in every framework."""

from __future__ import annotations

import numpy as np
import pytest

import tenterhook as th
from tenterhook.errors import EditError
from tests.contract.adapters.base import Adapter
from tests.contract.nets import B2, W2, X, close, loss_of, mlp, mlp_expected


def test_a_forward_callback_replaces_the_output(fw: Adapter) -> None:
    net, expected = mlp(fw), mlp_expected()
    with th.hooks(net) as hooks:
        hooks.forward("1", lambda module, args, output: output * 2)
        hooks.forward("1", lambda module, args, output: output * 5)
        out = net(fw.tensor(X))
    close(fw.array(out), expected.outputs["1"] * 10 @ W2.T + B2)


def test_a_forward_callback_changes_the_gradients_as_well(fw: Adapter) -> None:
    net = fw.module("Net", lambda self, x: self.c(x), c=fw.linear(np.float32([[2.0]])))
    with th.hooks(net) as hooks:
        hooks.forward("c", lambda module, args, output: output * 10)
        run = fw.run(net, loss_of(net, lambda y: y), [np.float32([[3.0]])])
    close(run.parameters["c.weight"], [[30.0]])


def test_a_pre_callback_replaces_the_arguments(fw: Adapter) -> None:
    net = fw.module("Net", lambda self, x, *, scale: x * scale)
    x, scale = fw.tensor(np.float32([2.0])), fw.tensor(np.float32([3.0]))
    with th.hooks(net) as hooks:
        hooks.forward_pre("", lambda module, args: (args[0] * 10,))
        hooks.forward_pre("", lambda module, args, kwargs: (args, {"scale": kwargs["scale"] * 2}), with_kwargs=True)
        close(fw.array(net(x, scale=scale)), [120.0])


def test_callbacks_put_in_front_run_first(fw: Adapter) -> None:
    net, seen = fw.relu(), []
    with th.hooks(net) as hooks:
        hooks.forward("", lambda module, args, output: seen.append("b"))
        hooks.forward("", lambda module, args, output: seen.append("c"))
        hooks.forward("", lambda module, args, output: seen.append("a"), prepend=True)
        net(fw.tensor(X))
    assert seen == ["a", "b", "c"]


def test_backward_callbacks_replace_gradients(fw: Adapter) -> None:
    net, expected = mlp(fw), mlp_expected()
    with th.hooks(net) as hooks:
        hooks.backward_pre("1", lambda module, out: (out[0] * 2,))
        hooks.backward("1", lambda module, into, out: (into[0] * 5,))
        run = fw.run(net, loss_of(net), [X])
    close(run.parameters["0.weight"], expected.parameters["0.weight"] * 10)
    close(run.parameters["2.0.weight"], expected.parameters["2.0.weight"])


def test_gradients_of_parameters_and_tensors_are_replaced(fw: Adapter) -> None:
    net, expected = mlp(fw), mlp_expected()
    with th.hooks(net) as hooks:
        hooks.param_grad("*.bias", lambda name, gradient: gradient * 0)
        hooks.forward("1", lambda module, args, output: hooks.tensor(output, lambda g: g * 3) and None)
        run = fw.run(net, loss_of(net), [X])
    close(run.parameters["0.bias"], np.zeros(4))
    close(run.parameters["2.0.bias"], expected.parameters["2.0.bias"] * 1)
    close(run.parameters["0.weight"], expected.parameters["0.weight"] * 3)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "backward_pre", "backward", "param_grad"])
def test_a_replacement_of_another_shape_is_refused(fw: Adapter, kind: str) -> None:
    net = mlp(fw)
    with th.hooks(net) as hooks:
        if kind == "forward":
            hooks.forward("1", lambda module, args, output: output.sum())
        elif kind == "forward_pre":
            hooks.forward_pre("1", lambda module, args: (args[0].sum(),))
        elif kind == "backward_pre":
            hooks.backward_pre("1", lambda module, out: (out[0].sum(),))
        elif kind == "backward":
            hooks.backward("1", lambda module, into, out: (into[0].sum(),))
        else:
            hooks.param_grad("0.weight", lambda name, gradient: gradient.sum())
        with pytest.raises(EditError, match="shape"):
            fw.run(net, loss_of(net), [X])
    close(fw.run(net, loss_of(net), [X]).loss, mlp_expected().loss)


def test_none_leaves_everything_bit_for_bit_as_it_was(fw: Adapter) -> None:
    net = mlp(fw)
    bare = fw.run(net, loss_of(net), [X], wrt_inputs=True)
    with th.hooks(net) as hooks:
        hooks.forward("**", lambda module, args, output: None)
        hooks.backward("**", lambda module, into, out: None)
        hooks.param_grad("**", lambda name, gradient: None)
        hooked = fw.run(net, loss_of(net), [X], wrt_inputs=True)
    assert hooked.loss == bare.loss
    assert np.array_equal(hooked.inputs[0], bare.inputs[0])
    for name, gradient in bare.parameters.items():
        assert np.array_equal(hooked.parameters[name], gradient)


def test_the_value_of_an_earlier_call_is_refused(fw: Adapter) -> None:
    net, store = mlp(fw), {}
    with th.hooks(net) as hooks:
        hooks.forward("0", lambda module, args, output: store.setdefault("0", output))
        net(fw.tensor(X))
        with pytest.raises(EditError, match="a value of an earlier call"):
            net(fw.tensor(X + 1))


def test_a_change_that_is_not_differentiated_is_told(fw: Adapter) -> None:
    net = mlp(fw)
    with th.hooks(net) as hooks:
        hooks.forward("0", lambda module, args, output: fw.overwrite(output, 0.5))
        with pytest.warns(th.TenterhookWarning, match="changed in place without being differentiated"):
            fw.run(net, loss_of(net), [X])
