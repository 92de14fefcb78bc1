"""`hooks.before` and `hooks.after`: any Python function, before and after its call, and exactly as it was afterwards."""

from __future__ import annotations

import asyncio
import copy
import functools
import io
import math
import pickle
import sys
import threading
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tenterhook as th
from tenterhook.errors import EditError, HookError


class Worker:
    rate = 3

    def run(self, x: int, *, scale: int = 1) -> int:
        return x * scale

    @classmethod
    def make(cls, x: int) -> tuple[type, int]:
        return cls, x

    @staticmethod
    def add(a: int, b: int) -> int:
        return a + b

    @property
    def size(self) -> int:
        return 5

    @functools.cached_property
    def cached(self) -> int:
        return 6

    def numbers(self) -> Any:
        yield from (1, 2)

    async def fetch(self) -> int:
        return 7


class Special(Worker):
    pass


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.fc(x))

    def generate(self, x: torch.Tensor, steps: int = 2) -> torch.Tensor:
        for _ in range(steps):
            x = self(x)
        return x


@pytest.fixture
def module() -> Any:
    made = types.ModuleType("somebody.elses")
    exec("def double(x):\n    return 2 * x\ndef twice(x):\n    return double(double(x))\n", made.__dict__)
    return made


@pytest.fixture
def hooks() -> Any:
    with th.hooks(Net()) as opened:
        yield opened


def test_a_function_of_a_module_is_seen_also_when_its_module_calls_it(hooks: Any, module: Any) -> None:
    original, seen = module.double, []
    before = hooks.before(module, "double", lambda instance, args, kwargs: seen.append((instance, args, kwargs)))
    after = hooks.after(module, "double", lambda instance, args, kwargs, result: seen.append(result))
    assert module.twice(1) == 4
    assert seen == [(None, (1,), {}), 2, (None, (2,), {}), 4]
    assert (before.fired, after.fired, before.live) == (2, 2, True)
    hooks.close()
    assert module.double is original
    assert not before.live


def test_arguments_and_results_can_be_replaced(hooks: Any, module: Any) -> None:
    hooks.before(module, "double", lambda instance, args, kwargs: ((args[0] + 1,), kwargs))
    hooks.after(module, "double", lambda instance, args, kwargs, result: result * 10 + args[0])
    assert module.double(1) == 42


def test_callbacks_run_in_order_of_registration_and_prepend_comes_first(hooks: Any, module: Any) -> None:
    order = []
    for name in "ab":
        hooks.before(module, "double", lambda i, a, k, name=name: order.append(name))
    hooks.before(module, "double", lambda i, a, k: order.append("first"), prepend=True)
    for name in "cd":
        hooks.after(module, "double", lambda i, a, k, r, name=name: order.append(name))
    module.double(1)
    assert order == ["first", "a", "b", "c", "d"]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_nested_sets_come_off_in_any_order(module: Any, order: tuple[int, ...]) -> None:
    original, seen = module.double, []
    sets = [th.hooks(nn.Linear(1, 1)) for _ in range(3)]
    for number, one in enumerate(sets):
        one.before(module, "double", lambda i, a, k, number=number: seen.append(number))
    for closed, number in enumerate(order):
        sets[number].close()
        seen.clear()
        assert module.double(4) == 8
        assert seen == [left for left in range(3) if left not in order[: closed + 1]]
    assert module.double is original


def test_a_method_is_hooked_for_all_objects_or_for_one(hooks: Any) -> None:
    one, other, seen = Worker(), Worker(), []
    original = Worker.__dict__["run"]
    with hooks.before(Worker, "run", lambda instance, args, kwargs: seen.append(("class", instance, args, kwargs))):
        hooks.before(one, "run", lambda instance, args, kwargs: seen.append(("one", instance, args, kwargs)))
        assert one.run(2, scale=5) == 10
        assert other.run(3) == 3
        assert Worker.run(other, 4) == 4
    assert seen == [
        ("one", one, (2,), {"scale": 5}),
        ("class", one, (2,), {"scale": 5}),
        ("class", other, (3,), {}),
        ("class", other, (4,), {}),
    ]
    assert Worker.__dict__["run"] is original
    assert "run" in vars(one)
    hooks.close()
    assert vars(one) == {}


def test_an_inherited_method_is_hooked_in_the_class_that_is_named(hooks: Any) -> None:
    handle = hooks.before(Special, "run", lambda instance, args, kwargs: None)
    Special().run(1)
    Worker().run(1)
    assert handle.fired == 1
    handle.remove()
    assert "run" not in vars(Special)


def test_class_and_static_methods(hooks: Any) -> None:
    raw = {name: Worker.__dict__[name] for name in ("make", "add")}
    seen: list[Any] = []
    hooks.before(Worker, "make", lambda instance, args, kwargs: seen.append((instance, args)))
    hooks.after(Worker, "add", lambda instance, args, kwargs, result: seen.append((instance, args, result)))
    assert Worker.make(1) == (Worker, 1)
    assert Special().make(2) == (Special, 2)
    assert Worker().add(1, b=2) == 3
    assert seen == [(Worker, (1,)), (Special, (2,)), (None, (1,), 3)]
    hooks.close()
    assert {name: Worker.__dict__[name] for name in raw} == raw


def test_builtin_functions_and_methods_of_tensors(hooks: Any) -> None:
    original, in_class = math.sqrt, "relu" in vars(torch.Tensor)
    seen: list[Any] = []
    hooks.before(math, "sqrt", lambda instance, args, kwargs: seen.append((instance, args)))
    relu = hooks.after(torch.Tensor, "relu", lambda instance, args, kwargs, result: seen.append(float(result)))
    assert math.sqrt(4) == 2
    assert torch.tensor(-1.0).relu() == 0
    assert seen == [(None, (4,)), 0.0]
    relu.remove()
    hooks.close()
    assert math.sqrt is original
    assert ("relu" in vars(torch.Tensor)) is in_class


def test_optimizer_step_generate_and_a_dataloader() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 3)), batch_size=2)
    counts: dict[str, int] = {}

    def count(name: str) -> Any:
        return lambda instance, args, kwargs: counts.update({name: counts.get(name, 0) + 1})

    with th.hooks(model) as hooks:
        hooks.before(optimizer, "step", count("step"))
        hooks.before(model, "generate", count("generate"))
        hooks.before(torch.utils.data.DataLoader, "__iter__", count("iter"))
        for (batch,) in loader:
            model.generate(batch).sum().backward()
            optimizer.step()
    assert counts == {"step": 2, "generate": 2, "iter": 1}
    assert "step" not in vars(optimizer)
    assert "generate" not in vars(model)


def test_a_learning_rate_schedule_made_inside_sees_the_same_steps() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps optimizer.step for good
    wrapped = vars(optimizer).get("step")
    with th.hooks(model) as hooks:
        handle = hooks.after(optimizer, "step", lambda instance, args, kwargs, result: None)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        schedule.step()
    assert handle.fired == 1
    assert vars(optimizer).get("step") is wrapped
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_what_somebody_else_wraps_around_ours_stays_and_ours_goes_quiet(module: Any) -> None:
    with th.hooks(Net()) as hooks:
        handle = hooks.before(module, "double", lambda instance, args, kwargs: None)
        inner = module.double

        @functools.wraps(inner)
        def theirs(x: int) -> int:
            return inner(x) + 1

        module.double = theirs
        assert module.double(1) == 3
        assert handle.live
    assert module.double is theirs
    assert module.double(1) == 3
    assert handle.fired == 1


def test_a_replaced_function_is_told(module: Any) -> None:
    with th.hooks(Net()) as hooks:
        handle = hooks.before(module, "double", lambda instance, args, kwargs: None)
        module.double = lambda x: x
        assert not handle.live
    assert "hooks were removed by somebody else" in str(hooks)
    assert module.double(3) == 3


def test_a_name_imported_earlier_is_told(hooks: Any, module: Any) -> None:
    earlier = module.double
    hooks.before(module, "double", lambda instance, args, kwargs: None)
    earlier(1)
    assert "never called as somebody.elses.double (a name imported earlier is the function itself)" in str(hooks)
    module.double(1)
    assert "never called" not in str(hooks)


def test_async_functions_and_generators_give_what_has_not_run_yet(hooks: Any) -> None:
    worker, results = Worker(), []
    hooks.before(worker, "fetch", lambda instance, args, kwargs: None)
    hooks.after(worker, "fetch", lambda instance, args, kwargs, result: results.append(type(result)))
    hooks.after(worker, "numbers", lambda instance, args, kwargs, result: results.append(type(result)))
    assert asyncio.run(worker.fetch()) == 7
    assert list(worker.numbers()) == [1, 2]
    assert results == [types.CoroutineType, types.GeneratorType]


@pytest.mark.parametrize(
    ("owner", "name", "says"),
    [
        (Worker, "size", "property"),
        (Worker(), "size", "property"),
        (Worker(), "cached", "cached_property"),
        (Worker, "rate", "a int"),
        (Worker, "missing", "no attribute 'missing'"),
        (Worker(), "missing", "no attribute 'missing'"),
        (nn, "Linear", "the class Linear"),
        ("torch.nn.functional", "relu", "the object that has it"),
        (torch, "nn.functional.relu", "the object that has it"),
        (Worker(), "__init__", "on the class"),
        (str, "join", "cannot be hooked"),
        (3, "bit_length", "no __dict__"),
        (Net(), "forward", "hooks.forward"),
        (Net(), "fc", "Linear"),
    ],
)
def test_what_is_no_function_is_refused_and_left_alone(hooks: Any, owner: Any, name: str, says: str) -> None:
    with pytest.raises(HookError, match=says):
        hooks.before(owner, name, lambda instance, args, kwargs: None)
    assert len(hooks) == 0


@pytest.mark.parametrize("fn", [lambda: None, lambda a, b: None, 3, None])
def test_a_wrong_signature_is_found_at_registration(hooks: Any, module: Any, fn: Any) -> None:
    original = module.double
    with pytest.raises(HookError, match="before"):
        hooks.before(module, "double", fn)
    with pytest.raises(HookError, match="after"):
        hooks.after(module, "double", fn)
    assert module.double is original


@pytest.mark.parametrize("kind", ["before", "after"])
def test_a_callback_that_raises_is_named_and_leaves_nothing(module: Any, kind: str) -> None:
    original = module.double

    def broken(*arguments: Any) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as caught, th.hooks(Net()) as hooks:
        getattr(hooks, kind)(module, "double", broken)
        module.double(1)
    if sys.version_info >= (3, 11):
        assert any(f"{kind} hook on somebody.elses.double" in note for note in caught.value.__notes__)
    assert module.double is original


def test_after_does_not_run_when_the_function_raises(hooks: Any, module: Any) -> None:
    handle = hooks.after(module, "double", lambda instance, args, kwargs, result: None)
    with pytest.raises(TypeError):
        module.double()
    assert handle.fired == 0


def test_a_callback_may_remove_itself_and_others_at_once(hooks: Any, module: Any) -> None:
    ran: list[str] = []
    handles: dict[str, Any] = {}

    def first(instance: Any, args: Any, kwargs: Any) -> None:
        ran.append("first")
        handles["first"].remove()
        handles["second"].remove()

    handles["first"] = hooks.before(module, "double", first)
    handles["second"] = hooks.before(module, "double", lambda instance, args, kwargs: ran.append("second"))
    assert [module.double(1), module.double(1)] == [2, 2]
    assert ran == ["first"]


def test_a_callback_that_calls_the_function_is_not_called_for_that(hooks: Any, module: Any) -> None:
    inner: list[int] = []
    handle = hooks.before(module, "double", lambda instance, args, kwargs: inner.append(module.double(5)))
    assert module.double(1) == 2
    assert inner == [10]
    assert handle.fired == 1


@pytest.mark.parametrize("returned", [[1], 3, torch.ones(1), ((1,),), (1, {})])
def test_before_must_return_arguments(hooks: Any, module: Any, returned: Any) -> None:
    hooks.before(module, "double", lambda instance, args, kwargs: returned)
    with pytest.raises(EditError, match=r"before of somebody\.elses\.double"):
        module.double(1)


@pytest.mark.parametrize("returned", [torch.ones(2), torch.ones(3, dtype=torch.float64), [torch.ones(3)], 1.0])
def test_after_must_return_the_like(hooks: Any, returned: Any) -> None:
    hooks.after(F, "relu", lambda instance, args, kwargs, result: returned)
    with pytest.raises(EditError, match=r"structure|shape|dtype"):
        F.relu(torch.ones(3))


def test_allow_permits_the_change(hooks: Any, module: Any) -> None:
    hooks.before(module, "double", lambda instance, args, kwargs: ((), {"x": "a"}), allow="structure")
    assert module.double(1) == "aa"


def test_fired_is_right_under_threads(hooks: Any, module: Any) -> None:
    handle = hooks.after(module, "double", lambda instance, args, kwargs, result: None)
    threads = [threading.Thread(target=lambda: [module.double(1) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert handle.fired == 2000


def test_copies_and_pickles_of_a_hooked_model_are_free_of_hooks() -> None:
    model = Net()
    with th.hooks(model) as hooks:
        handle = hooks.before(model, "generate", lambda instance, args, kwargs: None)
        copied = copy.deepcopy(model)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        for other in (copied, loaded):
            other.fc.weight.data.zero_()
            other.fc.bias.data.zero_()
            assert other.generate(torch.ones(1, 3)).sum() == 0  # its own weights, not those of the hooked model
        assert handle.fired == 0
        assert pickle.loads(pickle.dumps(F.relu)) is F.relu


def test_a_closed_set_takes_no_more(module: Any) -> None:
    hooks = th.hooks(Net())
    hooks.close()
    with pytest.raises(HookError, match="closed"):
        hooks.before(module, "double", lambda instance, args, kwargs: None)
