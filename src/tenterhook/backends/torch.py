"""The PyTorch backend.

Forward hooks and tensor hooks only: module backward hooks break in-place layers, are mute for nested outputs and fire
early where no input needs a gradient. Private torch names are used where no public one exists
(``_current_graph_task_id``, ``_functorch``); the tests in ``tests/semantics`` fail where a torch release renames them.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules import module as _module_registries
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tenterhook.backends import (
    After,
    Before,
    BeginningBackend,
    Detachable,
    Failed,
    InstalledHook,
    Instead,
    Layer,
    NativeBackend,
    OpListener,
    ParameterBackend,
    ParameterEntry,
)
from tenterhook.backends import _torch_checkpoint as checkpoint
from tenterhook.backends import _torch_models as models
from tenterhook.backends import _torch_shards as shards
from tenterhook.backends._torch_aliases import hand_back
from tenterhook.backends._torch_attachments import Attachment, put_in_layer, remove_late, use_own_key
from tenterhook.backends._torch_compiled import is_under_compiled, look_for_compiled, runs
from tenterhook.backends._torch_editing import Bypass, clip_together, constant, gradients, where
from tenterhook.backends._torch_fast_paths import closed_fast_paths
from tenterhook.backends._torch_hooks import AfterHook, BeforeHook, LoadHook
from tenterhook.backends._torch_installed import list_hooks
from tenterhook.backends._torch_native import attach_around, give_way, native_parts
from tenterhook.backends._torch_ops import OpMode, is_builtin_forward
from tenterhook.backends._torch_registering import calls_beginning, hooked_call
from tenterhook.backends._torch_taps import PostAccumulateTap, ShardTap, Tap, differentiated, tap_parameter, tap_tensor
from tenterhook.backends._torch_tracebacks import bare_traceback
from tenterhook.backends._torch_tracing import untraced
from tenterhook.backends._torch_unseen import call_unseen, hiding
from tenterhook.backends._torch_values import DTYPE_NAMES, PLAIN, TensorValues
from tenterhook.backends._types import FunctionT
from tenterhook.errors import UnsupportedError
from tenterhook.native import NATIVE, FrameworkParts
from tenterhook.selection import Entry

__all__ = ["BACKEND", "TorchBackend"]

_current_graph_task = torch._C._current_graph_task_id


class _AnyCall:
    """The global forward-pre hook of a recording that does not know its models yet."""

    def __init__(
        self, wanted: Callable[[Any], bool], fn: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
    ) -> None:
        self._wanted = wanted
        self._fn = fn

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if runs:
            look_for_compiled(module)
        # of a wrapper the module inside bears the name, and is called next
        if self._wanted(module) and not models.is_wrapper(module):
            # torch gives a global pre-hook no keyword arguments; they stand in the frame that calls it
            hiding(self._fn)(module, args, sys._getframe(1).f_locals.get("kwargs", {}))


class _Unwarned:
    """Keeps torch from warning, at each call of a compiled module, that there is a global hook: that is ours."""

    id = 0
    extra_dict_ref = ()  # as of a handle of torch

    def __init__(self) -> None:
        warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
        self._filter = warnings.filters[0]

    def hooks_dict_ref(self) -> dict[int, object]:
        return {self.id: self}

    def remove(self) -> None:
        with contextlib.suppress(ValueError):  # the user has set the filters anew
            cast("list[Any]", warnings.filters).remove(self._filter)


class TorchBackend(TensorValues, NativeBackend, ParameterBackend, BeginningBackend):
    """PyTorch, seen through what tenterhook needs (see :class:`tenterhook.backends.Backend`)."""

    name = "torch"
    tensor_types: tuple[type, ...] = (torch.Tensor,)
    tells_backward_end = True
    reenters = True
    knows_what_gets_gradients = True
    works_in_place_on_aliases = True

    def is_model(self, value: object) -> bool:
        return isinstance(value, (nn.Module, torch.jit.ScriptFunction)) or models.is_exported(value)

    def check(self, model: Any) -> None:
        if isinstance(model, torch.jit.ScriptFunction):
            raise UnsupportedError(
                "a script function runs no Python hooks\n  hook the module that it was made from, before torch.jit.script"
            )
        if models.is_exported(model):
            raise UnsupportedError(
                "an exported program is no module and runs no hooks\n"
                "  hook what exported.module() gives (its graph calls few modules), or the model before torch.export"
            )
        models.check(model)

    def entries(self, model: nn.Module) -> list[Entry]:
        return models.list_modules(model)

    @hiding
    def parameters(self, model: nn.Module) -> list[ParameterEntry]:
        return models.list_parameters(model)

    def same_parameters(self, model: nn.Module, before: object) -> object:
        return models.same_parameters(model, before)

    def blind_spots(self, model: nn.Module) -> dict[str, str]:
        return models.blind_spots(model)

    def fused(self, model: nn.Module) -> Collection[str]:
        return models.fused(model)

    def is_compiled(self, module: nn.Module) -> bool:
        return is_under_compiled(module)

    def forward_function(self, module: nn.Module) -> Callable[..., Any]:
        return module.forward

    def is_training(self, module: nn.Module) -> bool:
        return module.training

    # --- calls -----------------------------------------------------------------------------------------------------
    def attach(
        self,
        module: nn.Module,
        before: Before | None,
        after: After | None,
        failed: Failed | None = None,
        *,
        layer: Layer = Layer.OBSERVE,
    ) -> Detachable:
        give_way(module)
        return self._put_hooks(module, before, after, failed, layer=layer, native=None)

    def attach_native(
        self, module: nn.Module, before: Before, after: After, failed: Failed, *, native: tuple[Any, Any]
    ) -> Detachable:
        give_way(module)
        put_hooks = partial(
            self._put_hooks, before=before, after=after, failed=failed, layer=Layer.OBSERVE, native=native
        )
        handlers = BeforeHook(before, Layer.OBSERVE), partial(call_unseen, after), partial(call_unseen, failed)
        return attach_around(module, native, handlers, put_hooks)

    @staticmethod
    def _put_hooks(
        module: nn.Module,
        before: Before | None,
        after: After | None,
        failed: Failed | None,
        *,
        layer: Layer,
        native: tuple[Any, Any] | None,
    ) -> Attachment:
        handles: list[Any] = []
        try:
            if before is not None:
                hook: Any = BeforeHook(before, layer)
                if native is not None:
                    hook = NATIVE.Before(*native, hook, layer)
                handles.append(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=layer == Layer.FIRST))
                use_own_key(handles[-1])
                put_in_layer(module._forward_pre_hooks, handles[-1].id, layer)
            if after is not None or failed is not None:
                hook = AfterHook(after, failed, layer)
                if native is not None:
                    hook = NATIVE.After(*native, hook, layer)
                handles.append(
                    module.register_forward_hook(
                        hook,
                        with_kwargs=True,
                        always_call=failed is not None,
                        prepend=layer == Layer.FIRST,
                    )
                )
                use_own_key(handles[-1])
                put_in_layer(module._forward_hooks, handles[-1].id, layer)
        except BaseException:
            for handle in handles:
                handle.remove()
            raise
        return Attachment(handles)

    def unseen(self, fn: FunctionT) -> FunctionT:
        return hiding(fn)

    def native_parts(self) -> FrameworkParts | None:
        return native_parts(tuple(PLAIN))

    def running_modules(self) -> list[Any]:
        return models.running_modules()

    def on_any_call(
        self, wanted: Callable[[Any], bool], fn: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
    ) -> Detachable:
        return Attachment([_module_registries.register_module_forward_pre_hook(_AnyCall(wanted, fn)), _Unwarned()])

    def beginning(self, modules: Collection[nn.Module]) -> list[object]:
        return calls_beginning(modules)

    def hooked_call(self) -> object | None:
        return hooked_call()

    def on_optimizer_step(self, fn: Callable[[Any], None], *, before: bool = False) -> Detachable:
        @hiding
        def around_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            fn(optimizer)

        register = register_optimizer_step_pre_hook if before else register_optimizer_step_post_hook
        return Attachment([register(around_step)])

    def on_load(self, module: nn.Module, fn: Callable[[Any, Any], None]) -> Detachable:
        return Attachment([module.register_load_state_dict_post_hook(LoadHook(fn))])

    def installed_hooks(self, model: nn.Module) -> list[InstalledHook]:
        return list_hooks(model)

    def trace_ops(self, listener: OpListener) -> OpMode:
        return OpMode(listener)

    def owns_forward(self, module: nn.Module) -> bool:
        return is_builtin_forward(module)

    def bare_traceback(self, traceback: TracebackType | None) -> TracebackType | None:
        return bare_traceback(traceback)

    @hiding
    def has_optimizer(self, model: nn.Module) -> bool:
        return models.has_optimizer(model)

    @contextlib.contextmanager
    def seeing_everything(self, model: nn.Module | None) -> Iterator[Sequence[str]]:
        with closed_fast_paths(model) as told:
            del model  # a suspended frame would keep it alive
            yield told
        remove_late()

    # --- gradients -------------------------------------------------------------------------------------------------
    def tap(
        self, tensor: torch.Tensor, fn: Callable[[Any], Any], module: Any = None, owner: object = None
    ) -> Tap | str:
        return tap_tensor(tensor, fn, module, owner)

    @hiding
    def tap_parameter(
        self, parameter: torch.Tensor, fn: Callable[[Any], Any], *, accumulated: bool = False, edits: bool = False
    ) -> Detachable | str:
        if not parameter.requires_grad:
            return "requires_grad=False"
        if accumulated:
            return PostAccumulateTap(parameter, fn)
        if shards.is_dtensor(parameter):
            return ShardTap(parameter, fn, edits=edits)
        return tap_parameter(parameter, fn, edits=edits)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        alias = tensor.view_as(tensor)
        if type(alias) is torch.Tensor:
            # What is pinned to the one is on the other, whoever does it and whenever.
            setattr(alias, "__dict__", vars(tensor))  # noqa: B010 - a type checker holds it for read-only
        else:  # a class of its own may keep there what makes up the tensor
            vars(alias).update({name: value for name, value in vars(tensor).items() if name not in vars(alias)})
        return alias

    def hand_back(self, tensor: torch.Tensor, alias: torch.Tensor, version: int | None) -> str | None:
        return hand_back(tensor, alias, version)

    @hiding
    def version(self, tensor: torch.Tensor) -> int | None:
        return None if tensor.is_inference() else tensor._version

    def is_leaf(self, tensor: torch.Tensor) -> bool:
        return differentiated(
            tensor
        ).is_leaf  # of a batched tensor under vmap, which is none itself and dies with the call

    def wants_gradient(self, tensor: torch.Tensor) -> bool:
        return torch.is_grad_enabled() and differentiated(tensor).requires_grad

    tracks_gradients = staticmethod(torch.is_grad_enabled)
    work_done = staticmethod(torch.autograd._get_sequence_nr)  # pyright: ignore[reportPrivateImportUsage]
    regions = staticmethod(checkpoint.regions)
    untraced = staticmethod(untraced)

    def is_recomputing(self) -> bool:
        return _current_graph_task() != -1 and checkpoint.is_recomputing()

    def was_changed_by(self, key: object) -> bool:
        return _current_graph_task() == -1 or checkpoint.was_changed_by(key)

    def is_early_stop(self, error: BaseException) -> bool:
        return checkpoint.is_early_stop(error)

    def in_backward(self) -> bool:
        return _current_graph_task() != -1

    backward_token = staticmethod(_current_graph_task)

    def at_backward_end(self, fn: Callable[[], None]) -> bool:
        if _current_graph_task() == -1:
            return False
        torch.autograd.Variable._execution_engine.queue_callback(hiding(fn))
        return True

    # --- changing --------------------------------------------------------------------------------------------------
    def constant(self, value: Any, like: torch.Tensor, *, boolean: bool = False) -> torch.Tensor:
        return constant(value, like, boolean)

    def where(self, mask: torch.Tensor, new: Any, old: torch.Tensor) -> torch.Tensor:
        return where(mask, new, old)

    def bypass(self, module: nn.Module, instead: Instead) -> Bypass:
        give_way(module)
        return Bypass.on(module, instead)

    def gradients(self, fn: Callable[[Sequence[Any]], Any], at: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return gradients(fn, at)

    def clip_together(self, parameters: Sequence[Any], max_norm: float) -> None:
        clip_together(parameters, max_norm)

    # --- the rest --------------------------------------------------------------------------------------------------
    def environment(self) -> dict[str, Any]:
        process = shards.process()
        return {
            **({} if process is None else {"rank": process[0], "world": process[1]}),
            "framework": "torch",
            "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["cpu"],
            "seeds": {"torch": torch.initial_seed()},
            "modes": {
                "default_dtype": DTYPE_NAMES[torch.get_default_dtype()],
                "deterministic": torch.are_deterministic_algorithms_enabled(),
                "threads": torch.get_num_threads(),
                "autocast": torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"),
            },
        }


BACKEND = TorchBackend()
