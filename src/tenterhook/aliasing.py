"""Aliases that a module is given for its inputs, so that the gradients seen there are those through this module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tenterhook._placing import Placed
from tenterhook.backends import Backend, Detachable
from tenterhook.errors import UnsupportedError
from tenterhook.values import ParameterNames, replace_arguments

__all__ = ["InputAliases", "explanation"]

Tapping = Callable[[str, Any, bool], "Detachable | str | None"]
"""``(slot, tensor, is the tensor itself and not its alias)``; puts a tap on."""


_NOT_ON_ALIASES = (  # words of the framework's error, what the module did, what it can do as well
    ("detach views in-place", "calls detach_() on", "x = x.detach()"),
    ("change requires_grad flags of leaf variables", "changes requires_grad of", "x = x.detach()"),
)

_shared: dict[
    int, tuple[int | None, Any, Any]
] = {}  # id of an alias -> its module, the tensor behind it, the alias; while it runs


class InputAliases:
    """The aliases of one call, and the taps on them.

    A module that works in place on an alias cuts that one off: its tap never fires. So the tensor itself is tapped as well, as
    it is before the module runs, and once the module has run one of the two taps is taken off.
    """

    __slots__ = ("_backend", "_made", "_module", "_own", "_pairs", "_placed", "_taps", "by_slot")

    def __init__(self, backend: Backend, module: Any = None) -> None:
        self._backend = backend
        self._module = None if module is None else id(module)
        self._made: dict[int, Any] = {}  # id of the tensor -> its alias
        self._own: list[Any] = []
        self._taps: list[tuple[Any, int | None, Detachable | None, Detachable | None]] = []
        self._pairs: list[
            tuple[Any, Any, int | None]
        ] = []  # tensor, its alias, the alias's version before the module ran
        self._placed: list[Placed] = []  # aliases in containers of the caller's
        self.by_slot: dict[str, Any] = {}

    def add(self, slot: str, tensor: Any, tap: Tapping | None) -> bool:
        """Make an alias of one input; ``tap=None`` leaves it without taps.

        Returns:
            False where the tensor has been given before: it has one alias, since modules ask whether their query *is* their
            key, and its gradient comes at the first place. Also where a graph is being made of what runs, in which an alias would stay.
        """
        if self._backend.untraced() is not None:
            return False
        if id(tensor) in self._made:
            self.by_slot[slot] = self._made[id(tensor)]
            return False
        backend = self._backend
        first = id(tensor)
        shared = _shared.get(first)
        if shared is not None and self._module is not None and shared[0] == self._module:
            # A hook put on before has made it: on one alias the taps run in the order in which they were put on.
            tensor, alias = shared[1:]
        else:
            alias = backend.alias(tensor)
            _shared[id(alias)] = (self._module, tensor, alias)
            self._own.append(alias)
        self._made[first] = self.by_slot[slot] = alias
        self._pairs.append((tensor, alias, backend.version(alias)))
        behind = _shared.get(id(tensor))
        while (
            behind is not None
        ):  # an alias of another session: hooks after a call do not run in the reverse of those before it
            self._pairs.append((*behind[1:], backend.version(behind[2])))
            behind = _shared.get(id(behind[1]))
        if tap is not None:
            inner = tap(slot, alias, False)
            outer = None if backend.is_leaf(tensor) else tap(slot, tensor, True)
            self._taps.append((alias, backend.version(alias), _put_on(inner), _put_on(outer)))
        return True

    def given(self, names: ParameterNames | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of the call with aliases for the inputs; None where there are none.

        A container that the module may change is the caller's own, which has the aliases in it while the module runs.
        """
        return replace_arguments(names, args, kwargs, self.by_slot, placed=self._placed) if self.by_slot else None

    def settle(self, where: str) -> None:
        """The module has run: keep, of each pair of taps, the one that will see the gradient.

        Raises:
            UnsupportedError: the module has changed an alias in place, and the framework gives wrong gradients then.
        """
        taps, self._taps = self._taps, []
        refused = self._hand_back()
        self._forget()
        for alias, version, inner, outer in taps:
            _settle(self._backend, alias, version, inner, outer, where)
        if refused is not None:
            raise UnsupportedError(
                f"{where} {refused}: its input is an alias here, and the tensor itself would not be changed\n"
                "  leave it out when you ask for grad_input or hooks.backward; grad_output and backward_pre are safe"
            )

    def drop(self) -> None:
        """The module has raised: no gradient of this call is waited for."""
        taps, self._taps = self._taps, []
        self._hand_back()
        self._forget()
        for _, _, *both in taps:
            for tap in both:
                if tap is not None:
                    tap.remove()

    def _hand_back(self) -> str | None:
        """Do to the tensors what the module did to their aliases beyond their values; returns what cannot be done."""
        placed, self._placed = self._placed, []
        for one in reversed(placed):
            one.put_back()
        pairs, self._pairs = self._pairs, []
        refused = None
        for tensor, alias, version in pairs:
            refused = self._backend.hand_back(tensor, alias, version) or refused
        return refused

    def _forget(self) -> None:
        for alias in self._own:
            _shared.pop(id(alias), None)
        self._own.clear()
        self._made.clear()
        self.by_slot = {}


def explanation(error: BaseException) -> str | None:
    """Say of an error that a module raised whether the alias is to blame that it was given for its input."""
    text = str(error)
    if not isinstance(error, RuntimeError):
        return None
    for words, what, instead in _NOT_ON_ALIASES:
        if words in text:
            return (
                f"the module {what} its input, which is an alias here, since grad_input or hooks.backward was asked for: "
                f"leave the module out of that, or write {instead}"
            )
    return None


def _put_on(tap: Detachable | str | None) -> Detachable | None:
    return None if isinstance(tap, str) else tap


def _settle(
    backend: Backend, alias: Any, version: int | None, inner: Detachable | None, outer: Detachable | None, where: str
) -> None:
    """After a module has run, leave on only the tap that will see the gradient of its input.

    That is ``inner``, on the alias that the module was given; but where the module has changed the alias in place it is
    cut off from its gradient, and ``outer``, on the tensor itself as it was before, serves.

    Raises:
        UnsupportedError: the module has changed the alias in place, and the framework gives wrong gradients then.
    """
    if version is None or backend.version(alias) == version:
        unwanted = outer
    elif backend.works_in_place_on_aliases:
        unwanted = inner
    else:
        raise UnsupportedError(
            f"{where} changes its input in place: {backend.name} gives wrong gradients where that is watched\n"
            "  leave it out when you ask for grad_input or hooks.backward; grad_output and backward_pre are safe"
        )
    if unwanted is not None:
        unwanted.remove()
