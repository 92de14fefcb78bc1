"""A hook point inside MindSpore's ``load_param_into_net``, put in and taken out while the program runs.

Released MindSpore has no point at which code may run between the loading of the parameters and the guess at
mismatched prefixes. Replacing ``mindspore.load_param_into_net`` would miss everybody who has imported the function
before, so the function object stays and what it does is changed, in one of two ways:

* `CodeSwap` recompiles the loader's own source with one call added and swaps ``__code__``. Used if the source at hand
  compiles to exactly the code that is running and contains the place that the call belongs to.
* `ParameterWalk` wraps ``Cell.parameters_and_names``: the loader exhausts that generator just before the place in
  question, and the two lists are read from the loader's frame. Used if there is no source, or one of another shape.
"""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import operator
import sys
import warnings
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any, Protocol

import mindspore
from mindspore import nn
from mindspore.train import serialization

from tenterhook.errors import UnsupportedError

__all__ = ["CodeSwap", "HookPointInLoader", "ParameterWalk", "Runner", "choose_hook_point", "guess_prefixes"]

Runner = Callable[[Any, list[str], list[str], Any, bool], None]
"""What is called at the hook point: ``(net, missing_keys, unexpected_keys, parameter_dict, strict_load)``, of the loader's own."""

_RUNNER_NAME = "_tenterhook_post_load"
_PREFIX_PASS = "_load_dismatch_prefix_params"
_LOADER_LOCALS = ("net", "param_not_load", "ckpt_not_load", "parameter_dict", "strict_load")
_FUTURE_FLAGS = functools.reduce(
    operator.or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)


class HookPointInLoader(Protocol):
    """A way to run code inside the loader."""

    @property
    def applied(self) -> bool:
        """Whether the loader is changed at present."""
        ...

    def apply(self) -> None:
        """Put the hook point in; does nothing if it is in."""
        ...

    def undo(self) -> None:
        """Take the hook point out, leaving the loader as it was found; does nothing if it is out."""
        ...


def choose_hook_point(runner: Runner) -> HookPointInLoader:
    """Choose the best hook point that the installed MindSpore allows.

    Args:
        runner: What to call at the hook point.

    Raises:
        UnsupportedError: The loader has a form in which the hook point cannot be found.
    """
    loader = inspect.unwrap(serialization.load_param_into_net)
    if not isinstance(loader, FunctionType):
        raise UnsupportedError(_unsupported(f"it is a {type(loader).__name__}, not a Python function"))
    code = _code_with_call(loader)
    if code is not None:
        return CodeSwap(loader, code, runner)
    lacking = [name for name in _LOADER_LOCALS if name not in loader.__code__.co_varnames]
    if "parameters_and_names" not in loader.__code__.co_names:
        lacking.append("parameters_and_names")
    if lacking:
        raise UnsupportedError(_unsupported(f"it does not use {', '.join(lacking)}"))
    return ParameterWalk(loader, runner)


def guess_prefixes(net: Any, missing_keys: list[str], given: Any, strict: bool) -> None:
    """Do what the loader does next: load what is missing under names with a prefix, and take it off the list.

    The loader does so once more afterwards, and finds nothing that is left to do.
    """
    guess = getattr(serialization, _PREFIX_PASS, None)
    if guess is not None and missing_keys and not strict:
        guess(net, given, missing_keys, strict)


def _unsupported(found: str) -> str:
    return (
        "cannot run hooks inside mindspore.load_param_into_net: "
        f"that of MindSpore {mindspore.__version__} has an unknown form ({found}); "
        "use Cell.load_state_dict with Cell.register_load_state_dict_post_hook, or a MindSpore of 2.6 to 2.10"
    )


class CodeSwap:
    """Changes what the loader does by giving the same function object another ``__code__``."""

    def __init__(self, loader: FunctionType, code: CodeType, runner: Runner) -> None:
        self._loader = loader
        self._code = code
        self._runner = runner
        self._original: CodeType | None = None

    @property
    def applied(self) -> bool:
        """Whether the loader is changed at present."""
        return self._original is not None

    def apply(self) -> None:
        """Swap the code in."""
        if self._original is not None:
            return
        self._original = self._loader.__code__
        self._loader.__globals__[_RUNNER_NAME] = self._runner
        self._loader.__code__ = self._code

    def undo(self) -> None:
        """Put the very code object back that was there before."""
        if self._original is None:
            return
        if self._loader.__code__ is not self._code:
            _warn_changed_by_others("load_param_into_net.__code__")
            return
        self._loader.__code__ = self._original
        self._loader.__globals__.pop(_RUNNER_NAME, None)
        self._original = None


class ParameterWalk:
    """Acts when the loader has walked to the end of ``net.parameters_and_names()``.

    Does not see a net whose class overrides ``parameters_and_names`` without calling the inherited one.
    """

    def __init__(self, loader: FunctionType, runner: Runner) -> None:
        self._loader_code = loader.__code__
        self._runner = runner
        self._original: Any = None
        self._wrapper: Any = None

    @property
    def applied(self) -> bool:
        """Whether ``Cell.parameters_and_names`` is wrapped at present."""
        return self._wrapper is not None

    def apply(self) -> None:
        """Wrap ``Cell.parameters_and_names``."""
        if self._wrapper is not None:
            return
        original = nn.Cell.__dict__["parameters_and_names"]

        @functools.wraps(original)
        def parameters_and_names(cell: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
            yield from original(cell, *args, **kwargs)
            self._walked(cell, sys._getframe(1))

        self._original, self._wrapper = original, parameters_and_names
        setattr(nn.Cell, "parameters_and_names", parameters_and_names)  # noqa: B010 - its declared type is narrower

    def undo(self) -> None:
        """Put the very function back that was there before."""
        if self._wrapper is None:
            return
        if nn.Cell.__dict__["parameters_and_names"] is not self._wrapper:
            _warn_changed_by_others("Cell.parameters_and_names")
            return
        nn.Cell.parameters_and_names = self._original
        self._original = self._wrapper = None

    def _walked(self, cell: Any, frame: FrameType | None) -> None:
        # An override may delegate with `yield from`: its own generator frames lie between the loader and us.
        while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
            frame = frame.f_back
        if frame is None or frame.f_code is not self._loader_code:
            return
        net, missing, unexpected, given, strict = (frame.f_locals[name] for name in _LOADER_LOCALS)
        if net is cell:
            self._runner(net, missing, unexpected, given, strict)


def _code_with_call(loader: FunctionType) -> CodeType | None:
    """Compile the loader's source with the runner's call added; None if that cannot be done faithfully."""
    first_line = loader.__code__.co_firstlineno
    try:
        tree = ast.parse("".join(inspect.findsource(loader)[0]))
    except (OSError, TypeError, SyntaxError):
        return None
    # The imports stay, because the compiler treats a call on an imported name differently.
    tree.body = [
        node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom) or _starts(node, first_line)
    ]
    definition = next((node for node in tree.body if isinstance(node, ast.FunctionDef)), None)
    if definition is None:
        return None
    # A source file edited since it was imported, or a function patched by others, must not be recompiled.
    if not _same_code(_compile(tree, loader), loader.__code__):
        return None
    place = next((i for i, statement in enumerate(definition.body) if _is_prefix_pass(statement)), None)
    names = loader.__code__.co_varnames
    if place is None or any(name not in names for name in _LOADER_LOCALS):
        return None
    call = ast.parse(f"{_RUNNER_NAME}({', '.join(_LOADER_LOCALS)})").body[0]
    for node in ast.walk(call):
        ast.copy_location(node, definition.body[place])
    definition.body.insert(place, call)
    return _compile(tree, loader)


def _starts(node: ast.stmt, line: int) -> bool:
    return isinstance(node, ast.FunctionDef) and line in (node.lineno, *(item.lineno for item in node.decorator_list))


def _is_prefix_pass(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and any(
        isinstance(node, ast.Name) and node.id == _PREFIX_PASS for node in ast.walk(statement)
    )


def _compile(tree: ast.Module, like: FunctionType) -> CodeType | None:
    """Compile a module of imports and one function, without running it, and give the function's code."""
    flags = like.__code__.co_flags & _FUTURE_FLAGS
    module = compile(tree, like.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
    found = [const for const in module.co_consts if isinstance(const, CodeType) and const.co_name == like.__name__]
    return found[0] if len(found) == 1 else None


def _same_code(one: CodeType | None, other: CodeType) -> bool:
    return one is not None and all(
        getattr(one, name) == getattr(other, name)
        for name in ("co_code", "co_consts", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags")
    )


def _warn_changed_by_others(what: str) -> None:
    warnings.warn(
        f"mindspore's {what} has been changed by somebody else since tenterhook changed it and is left as it is; "
        "undo the later change first, then call tenterhook.mindspore.uninstall() again",
        RuntimeWarning,
        stacklevel=4,
    )
