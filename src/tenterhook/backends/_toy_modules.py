"""The modules and the optimizer of the toy framework, and the tables that hooks on them are in."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tenterhook.backends import After, Before, Failed, Instead, Layer, ParameterEntry
from tenterhook.backends import _places as places
from tenterhook.backends._toy_tensors import Parameter, Tensor

__all__ = [
    "SGD",
    "IncompatibleKeys",
    "Linear",
    "Module",
    "ReLU",
    "Sequential",
    "ToyHook",
    "after_step",
    "any_call",
    "before_step",
    "list_parameters",
    "optimizers",
    "running_modules",
    "walk",
]

any_call: list[Callable[[Module, tuple[Any, ...], dict[str, Any]], None]] = []
before_step: list[Callable[[SGD], None]] = []
after_step: list[Callable[[SGD], None]] = []
optimizers: weakref.WeakSet[SGD] = weakref.WeakSet()
_running: dict[int, list[Module]] = {}  # thread -> modules that are being called, the innermost last


class Module:
    """A module: attributes that are modules or parameters are its own."""

    def __init__(self) -> None:
        self.training = True
        self.hooks: list[ToyHook] = []
        self.load_hooks: list[Callable[[Module, IncompatibleKeys], None]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = self._call
        for hook in self.hooks:
            if hook.instead is not None:
                call = partial(_bypassed, hook.instead, call)
        running = _running.setdefault(threading.get_ident(), [])
        running.append(self)
        try:
            return call(*args, **kwargs)
        finally:
            running.pop()

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        for listener in any_call[:]:
            listener(self, args, kwargs)
        for hook in self.hooks[:]:
            changed = hook.before(self, args, kwargs) if hook.before is not None else None
            if changed is not None:
                args, kwargs = changed
        try:
            output = self.forward(*args, **kwargs)
        except Exception as error:
            for hook in self.hooks[:]:
                if hook.failed is not None:
                    hook.failed(self, args, kwargs, error)
            raise
        for hook in self.hooks[:]:
            changed = hook.after(self, args, kwargs, output) if hook.after is not None else None
            if changed is not None:
                output = changed
        return output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the output; to be defined by each module."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    def children(self) -> Iterator[tuple[str, Module]]:
        """Yield the modules inside, with their names."""
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value

    def own_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the parameters of this very module, with their names."""
        for name, value in vars(self).items():
            if isinstance(value, Parameter):
                yield name, value

    def parameters(self) -> list[Parameter]:
        """List all parameters, of the modules inside as well, each once."""
        return [entry.parameter for entry in list_parameters(self)]

    def load(self, values: Mapping[str, np.ndarray]) -> IncompatibleKeys:
        """Set parameters by their names, and return which names did not fit."""
        own = {entry.name: entry.parameter for entry in list_parameters(self)}
        keys = IncompatibleKeys(
            [name for name in own if name not in values], [name for name in values if name not in own]
        )
        for name in own.keys() & values.keys():
            own[name].data = np.array(values[name])
        for hook in self.load_hooks[:]:
            hook(self, keys)
        return keys


def _bypassed(instead: Instead, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return instead(call, args, kwargs)


def walk(model: Module) -> Iterator[tuple[str, str, Module, bool]]:
    """Yield (path, raw path, module, False) for every path of every module, the root first."""
    return places.walk(model, Module.children)


def list_parameters(model: Module) -> list[ParameterEntry]:
    """List every parameter once, under its first name."""
    return places.list_parameters(walk(model), Module.own_parameters)


def running_modules() -> list[Module]:
    """List the modules whose calls are running in this thread, innermost first."""
    return _running.get(threading.get_ident(), [])[::-1]


@dataclass(slots=True)
class IncompatibleKeys:
    """Names that did not fit in a load."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Linear(Module):
    """``x @ weight + bias``; weight float64 (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int, seed: int = 0) -> None:
        super().__init__()
        generator = np.random.default_rng(seed)
        self.weight = Parameter(generator.normal(size=(inputs, outputs)) / np.sqrt(inputs))
        self.bias = Parameter(np.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class ReLU(Module):
    """``max(x, 0)``."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


class Sequential(Module):
    """Modules one after another, named by their numbers."""

    def __init__(self, *modules: Module) -> None:
        super().__init__()
        for number, module in enumerate(modules):
            setattr(self, str(number), module)

    def forward(self, x: Any) -> Any:
        for _, module in self.children():
            x = module(x)
        return x


class SGD:
    """Gradient descent without anything."""

    def __init__(self, parameters: Sequence[Parameter], lr: float) -> None:
        self.parameters = list(parameters)
        self.lr = lr
        optimizers.add(self)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        """Change each parameter by ``-lr * grad``."""
        for fn in before_step[:]:
            fn(self)
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.data = parameter.data - self.lr * parameter.grad
        for fn in after_step[:]:
            fn(self)


class ToyHook:
    """Callbacks around the calls of one module, or one in their place."""

    _removals = itertools.count(1)

    def __init__(
        self,
        module: Module,
        before: Before | None = None,
        after: After | None = None,
        failed: Failed | None = None,
        *,
        instead: Instead | None = None,
        layer: Layer = Layer.OBSERVE,
    ) -> None:
        self.module = weakref.ref(module)
        self.before, self.after, self.failed, self.instead = before, after, failed, instead
        self.layer = layer
        self.removed = 0  # when it was taken off, among all that were
        self._followers: list[ToyHook] = []

    @property
    def live(self) -> bool:
        """Whether it is on."""
        module = self.module()
        return module is not None and self in module.hooks

    def put_on(self) -> ToyHook:
        """Put it behind the hooks of its layer, or first of all."""
        module = self.module()
        assert module is not None
        later = (place for place, other in enumerate(module.hooks) if other.layer > self.layer)
        module.hooks.insert(0 if self.layer == Layer.FIRST else next(later, len(module.hooks)), self)
        return self

    def remove(self) -> None:
        """Take it off. A second call does nothing."""
        module = self.module()
        if module is not None and self in module.hooks:
            self.removed = next(self._removals)
            place = module.hooks.index(self)
            self._followers = module.hooks[place + 1 :]
            del module.hooks[place]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Put it back, if it is off by now, to where it was among its neighbours, for the length of a context."""
        module = self.module()
        if module is None or self.live:
            yield
            return
        places = [module.hooks.index(follower) for follower in self._followers if follower in module.hooks]
        module.hooks.insert(min(places, default=len(module.hooks)), self)
        try:
            yield
        finally:
            self.remove()

    def __deepcopy__(self, memo: object) -> ToyHook:
        return ToyHook(Module())
