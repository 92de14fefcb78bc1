"""``th.hooks``: the same callbacks, in the same order, with the same values in every framework."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import tenterhook as th
from tenterhook.errors import HookError, SelectionError
from tests.contract.adapters.base import Adapter
from tests.contract.nets import W0, X, close, loss_of, mlp, mlp_expected

FORWARD = ["0", "1", "2.0", "2", ""]
BACKWARD_PRE = ["", "2", "2.0", "1", "0"]
BACKWARD = ["2.0", "2", "1", "0", ""]


# ---- what callbacks see ----


def test_forward_callbacks_see_the_calls_in_order(fw: Adapter) -> None:
    net, seen = mlp(fw), []
    with th.hooks(net) as hooks:
        hooks.forward_pre("**", lambda name, module, args: seen.append(("pre", name)), with_name=True)
        hooks.forward("**", lambda name, module, args, output: seen.append(("post", name)), with_name=True)
        net(fw.tensor(X))
    assert seen == [
        ("pre", ""), ("pre", "0"), ("post", "0"), ("pre", "1"), ("post", "1"), ("pre", "2"), ("pre", "2.0"),
        ("post", "2.0"), ("post", "2"), ("post", ""),
    ]  # fmt: skip


def test_forward_callbacks_see_the_values(fw: Adapter) -> None:
    net, expected, seen = mlp(fw), mlp_expected(), {}
    with th.hooks(net) as hooks:
        hooks.forward("**", lambda name, module, args, output: seen.update({name: output}), with_name=True)
        net(fw.tensor(X))
    for path, value in expected.outputs.items():
        close(fw.array(seen[path]), value)


@pytest.mark.parametrize("wrt_inputs", [True, False])
def test_the_order_of_backward_nests_whether_or_not_the_input_needs_a_gradient(fw: Adapter, wrt_inputs: bool) -> None:
    net, pre, post = mlp(fw), [], []
    with th.hooks(net) as hooks:
        hooks.backward_pre("**", lambda name, module, grad_output: pre.append(name), with_name=True)
        hooks.backward("**", lambda name, module, grad_input, grad_output: post.append(name), with_name=True)
        fw.run(net, loss_of(net), [X], wrt_inputs=wrt_inputs)
    assert pre == BACKWARD_PRE
    assert post == BACKWARD


def test_backward_callbacks_see_the_gradients(fw: Adapter) -> None:
    net, expected, seen = mlp(fw), mlp_expected(), {}
    with th.hooks(net) as hooks:
        hooks.backward(
            "**",
            lambda name, module, into, out: seen.update({name: (fw.array(into[0]), fw.array(out[0]))}),
            with_name=True,
        )
        run = fw.run(net, loss_of(net), [X], wrt_inputs=True)
    for path in FORWARD:
        close(seen[path][0], expected.grad_inputs[path])
        close(seen[path][1], expected.grad_outputs[path])
    close(run.loss, expected.loss)
    close(run.inputs[0], expected.grad_inputs[""])


def test_what_needs_no_gradient_is_none(fw: Adapter) -> None:
    net, seen = mlp(fw), {}
    with th.hooks(net) as hooks:
        hooks.backward("**", lambda name, module, into, out: seen.update({name: tuple(into)}), with_name=True)
        fw.run(net, loss_of(net), [X])
    assert seen["0"] == (None,) and seen[""] == (None,)
    assert seen["1"][0] is not None


def test_gradients_of_parameters(fw: Adapter) -> None:
    net, expected, seen = mlp(fw), mlp_expected(), {}
    with th.hooks(net) as hooks:
        hooks.param_grad("**", lambda name, gradient: seen.update({name: fw.parameter_array(name, gradient)}))
        fw.run(net, loss_of(net), [X])
    assert seen.keys() == expected.parameters.keys()
    for name, gradient in expected.parameters.items():
        close(seen[name], gradient)


def test_gradient_of_a_tensor(fw: Adapter) -> None:
    net, expected, seen = mlp(fw), mlp_expected(), []
    with th.hooks(net) as hooks:
        hooks.forward(
            "1", lambda module, args, output: hooks.tensor(output, lambda g: seen.append(fw.array(g))) and None
        )
        fw.run(net, loss_of(net), [X])
    close(seen[0], expected.grad_outputs["1"])


def test_a_shared_module_is_seen_at_each_call(fw: Adapter) -> None:
    """MindSpore's own backward hooks report one call here, with wrong gradients."""
    inner = fw.linear(np.float32([[2.0]]))
    net = fw.module("Siamese", lambda self, a, b: self.c(a) + self.c(b) * 10, c=inner)
    outputs, into = [], []
    a, b = np.float32([[1.0]]), np.float32([[5.0]])
    with th.hooks(net) as hooks:
        hooks.backward_pre("c", lambda module, out: outputs.append(fw.array(out[0]).item()))
        hooks.backward("c", lambda module, into_, out: into.append(fw.array(out[0]).item()))
        run = fw.run(net, lambda x, y: net(x, y).sum(), [a, b])
    assert sorted(outputs) == sorted(into) == [1.0, 10.0]
    close(run.parameters["c.weight"], [[51.0]])


def test_a_recurrent_module(fw: Adapter) -> None:
    net = fw.module("Twice", lambda self, x: self.c(self.c(x)), c=fw.linear(np.float32([[2.0]])))
    seen = []
    with th.hooks(net) as hooks:
        hooks.backward("c", lambda module, into, out: seen.append((into[0] is None, fw.array(out[0]).item())))
        run = fw.run(net, loss_of(net, lambda y: y), [np.float32([[3.0]])])
    assert seen == [(False, 1.0), (True, 2.0)]
    close(run.parameters["c.weight"], [[12.0]])


def test_nested_outputs(fw: Adapter) -> None:
    """MindSpore's own hooks give the gradient of the input here."""
    made = fw.module("Nested", lambda self, x: {"a": x * 2, "b": [x * 3, (x * 4, None, 5)]})
    net = fw.module("Net", lambda self, x: self.inner(x * 1), inner=made)
    seen = []

    def loss(x: Any) -> Any:
        out = net(x)
        return (out["a"] + out["b"][0] * 10 + out["b"][1][0] * 100).sum()

    with th.hooks(net) as hooks:
        hooks.backward(
            "inner",
            lambda module, into, out: seen.append(
                (fw.array(into[0]).item(), {slot: fw.array(out[slot]).item() for slot in out.slots})
            ),
        )
        fw.run(net, loss, [np.float32([1.0])], wrt_inputs=True)
    assert seen == [(432.0, {'["a"]': 1.0, '["b"][0]': 10.0, '["b"][1][0]': 100.0})]


def test_keyword_and_nested_inputs(fw: Adapter) -> None:
    inner = fw.module("Inner", lambda self, pair, *, scale: pair[0] * 2 + pair[1] * 3 * scale)
    net = fw.module("Net", lambda self, x, y: self.inner((x * 1, y * 1), scale=x * 2), inner=inner)
    seen, given = [], []
    with th.hooks(net) as hooks:
        hooks.forward_pre("inner", lambda module, args, kwargs: given.append(list(kwargs)), with_kwargs=True)
        hooks.backward(
            "inner", lambda module, into, out: seen.append({slot: fw.array(into[slot]).item() for slot in into.slots})
        )
        run = fw.run(net, lambda x, y: net(x, y).sum(), [np.float32([1.0]), np.float32([10.0])], wrt_inputs=True)
    assert given == [["scale"]]
    assert seen == [{"pair[0]": 2.0, "pair[1]": 6.0, "scale": 30.0}]
    close(run.inputs, [[62.0], [6.0]])


def test_a_module_that_returns_its_input(fw: Adapter) -> None:
    net = fw.module("Net", lambda self, x: self.same(x * 2) * 3, same=fw.identity())
    seen = []
    with th.hooks(net) as hooks:
        hooks.backward(
            "same", lambda module, into, out: seen.append((fw.array(into[0]).item(), fw.array(out[0]).item()))
        )
        run = fw.run(net, lambda x: net(x).sum(), [np.float32([1.0])], wrt_inputs=True)
    assert seen == [(3.0, 3.0)]
    close(run.inputs, [[6.0]])


def test_an_output_that_nobody_uses(fw: Adapter) -> None:
    net = fw.module("Net", lambda self, x: (self.used(x), self.unused(x))[0], used=fw.relu(), unused=fw.relu())
    with th.hooks(net) as hooks:
        handle = hooks.backward_pre("*used", lambda module, out: None)
        fw.run(net, lambda x: net(x).sum(), [X], wrt_inputs=True)
        fired = {site.path: site.fired for site in handle.sites}
    assert fired == {"used": 1, "unused": 0}


def test_no_gradients_no_backward_and_the_reason_is_told(fw: Adapter) -> None:
    net = mlp(fw)
    with th.hooks(net) as hooks:
        handle = hooks.backward_pre("**", lambda module, out: None)
        fw.without_gradients(lambda: net(fw.tensor(X)))
        assert handle.fired == 0
        assert all(hooks.why_not_fired(site).startswith("no gradient") for site in handle.sites)


# ---- exceptions ----


class Boom(Exception):
    pass


def _raise(*args: Any) -> None:
    raise BOOM


BOOM = Boom("from the callback")


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "backward_pre", "backward", "param_grad"])
def test_an_exception_in_a_callback_arrives_as_it_is_and_leaves_no_harm(fw: Adapter, kind: str) -> None:
    """MindSpore's own backward hooks give garbage in the next pass."""
    net, expected = mlp(fw), mlp_expected()
    with th.hooks(net) as hooks:
        handle = getattr(hooks, kind)("0.weight" if kind == "param_grad" else "0", _raise)
        with pytest.raises(Boom) as caught:
            fw.run(net, loss_of(net), [X])
        assert caught.value is BOOM
        handle.remove()
        seen = []
        hooks.backward("0", lambda module, into, out: seen.append(fw.array(out[0])))
        run = fw.run(net, loss_of(net), [X])
    assert len(seen) == 1
    close(seen[0], expected.grad_outputs["0"])
    close(run.parameters["0.weight"], expected.parameters["0.weight"])


def test_an_exception_in_the_forward_leaves_no_harm(fw: Adapter) -> None:
    def forward(self: Any, x: Any) -> Any:
        if fails[0]:
            raise BOOM
        return x * 2

    fails = [True]
    net = fw.module("Net", lambda self, x: self.inner(x), inner=fw.module("Inner", forward))
    seen, always = [], []
    with th.hooks(net) as hooks:
        hooks.forward("inner", lambda module, args, output: always.append(output), always_call=True)
        hooks.backward("inner", lambda module, into, out: seen.append(fw.array(out[0]).tolist()))
        with pytest.raises(Boom) as caught:
            fw.run(net, lambda x: net(x).sum(), [np.float32([1.0, 2.0])], wrt_inputs=True)
        assert caught.value is BOOM and always == [None]
        fails[0] = False
        run = fw.run(net, lambda x: net(x).sum(), [np.float32([1.0, 2.0])], wrt_inputs=True)
    assert seen == [[1.0, 1.0]]
    close(run.inputs, [[2.0, 2.0]])


# ---- coming off ----


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "backward_pre", "backward", "param_grad"])
def test_a_callback_removes_itself_while_it_runs(fw: Adapter, kind: str) -> None:
    net, times, handles = mlp(fw), [], []

    def once(*args: Any) -> None:
        times.append(1)
        handles[0].remove()

    with th.hooks(net) as hooks:
        handles.append(getattr(hooks, kind)("0.weight" if kind == "param_grad" else "0", once))
        fw.run(net, loss_of(net), [X])
        fw.run(net, loss_of(net), [X])
        assert not handles[0].live
    assert times == [1]


def test_a_tensor_callback_removes_itself_while_it_runs(fw: Adapter) -> None:
    net, times = mlp(fw), []

    def put_on(module: Any, args: Any, output: Any) -> None:
        def once(gradient: Any) -> None:
            times.append(1)
            handle.remove()

        handle = hooks.tensor(output, once)

    with th.hooks(net) as hooks:
        hooks.forward("1", put_on)
        fw.run(net, loss_of(net), [X])
        fw.run(net, loss_of(net), [X])
    assert times == [1, 1]


def test_nothing_fires_after_the_with(fw: Adapter) -> None:
    net, seen = mlp(fw), []
    with th.hooks(net) as hooks:
        hooks.forward("**", lambda module, args, output: seen.append("forward"))
        hooks.backward("**", lambda module, into, out: seen.append("backward"))
        hooks.param_grad("**", lambda name, gradient: seen.append("param_grad"))
    fw.run(net, loss_of(net), [X])
    assert seen == []
    assert all(not site.live for site in hooks.sites)


def test_two_sets_on_one_model_do_not_meddle(fw: Adapter) -> None:
    net, first, second = mlp(fw), [], []
    with th.hooks(net) as outer:
        outer.backward("1", lambda module, into, out: first.append(1))
        with th.hooks(net) as inner:
            inner.backward("1", lambda module, into, out: second.append(1))
            fw.run(net, loss_of(net), [X])
        fw.run(net, loss_of(net), [X])
    assert (first, second) == ([1, 1], [1])


def test_a_copy_of_a_hooked_model_carries_no_hooks(fw: Adapter) -> None:
    """MindSpore's own backward hooks make a copy impossible."""
    net, seen = mlp(fw), []
    with th.hooks(net) as hooks:
        hooks.backward("**", lambda module, into, out: seen.append(1))
        hooks.param_grad("**", lambda name, gradient: seen.append(1))
        twin = copy.deepcopy(net)
        run = fw.run(twin, loss_of(twin), [X])
        assert seen == []
    close(run.parameters["0.weight"], mlp_expected().parameters["0.weight"])


# ---- checkpoints ----


def test_a_recomputed_region_counts_once(fw: Adapter) -> None:
    inner = fw.sequential(fw.linear(W0), fw.relu())
    net = fw.sequential(fw.checkpointed(inner))
    outputs = []
    with th.hooks(net) as hooks:
        forward = hooks.forward("type:ReLU", lambda module, args, output: None)
        backward = hooks.backward_pre("type:ReLU", lambda module, out: outputs.append(fw.array(out[0])))
        run = fw.run(net, lambda x: net(x).sum(), [X], wrt_inputs=True)
    assert forward.fired == 1
    assert backward.fired == 1
    close(outputs[0], np.ones((2, 4)))
    close(run.inputs[0], ((X @ W0.T) > 0) @ W0)


def test_an_edit_in_a_recomputed_region_is_repeated(fw: Adapter) -> None:
    net = fw.sequential(fw.checkpointed(fw.sequential(fw.relu(), fw.linear(W0))))
    with th.hooks(net) as hooks:
        hooks.forward("type:ReLU", lambda module, args, output: output * 10)
        run = fw.run(net, lambda x: net(x).sum(), [X], wrt_inputs=True)
    close(run.inputs[0], 10 * (X > 0) * W0.sum(0))
    (of_weight,) = run.parameters.values()
    close(of_weight, np.ones((2, 4)).T @ np.maximum(X, 0) * 10)


# ---- what is refused ----


def test_a_selection_without_a_match_and_a_callback_that_does_not_fit(fw: Adapter) -> None:
    net = mlp(fw)
    with th.hooks(net) as hooks:
        with pytest.raises(SelectionError, match=r"2\.0"):
            hooks.forward("2.O", lambda module, args, output: None)
        with pytest.raises(HookError, match="output"):
            hooks.forward("**", lambda module: None)
        with pytest.raises(HookError, match="tensor"):
            hooks.tensor(3, lambda gradient: None)
