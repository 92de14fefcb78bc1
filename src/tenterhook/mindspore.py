"""Give MindSpore's cells the method ``register_load_param_into_net_post_hook``.

Importing this module is enough::

    import tenterhook.mindspore


    def post_load_hook(cell, incompatible_keys):
        print(incompatible_keys.missing_keys, incompatible_keys.unexpected_keys)
        incompatible_keys.missing_keys.clear()


    handle = net.register_load_param_into_net_post_hook(post_load_hook)
    mindspore.load_param_into_net(net, parameters)
    handle.remove()

The hook runs once the parameters are in place and before mismatched prefixes are guessed at, however
``load_param_into_net`` was imported. It receives the loader's own two lists: what it clears, nobody is told about. If
it empties ``missing_keys``, the guess at prefixes is skipped, and parameters whose names differ by a prefix keep the
values they have. `uninstall` takes all of it out again. A MindSpore that has the method itself is left alone.
``th.hooks(net).load`` runs after that guess, on the lists that the call returns.
"""

from __future__ import annotations

import threading
from typing import Any

from tenterhook.errors import MissingExtraError

try:
    from mindspore import nn
except ModuleNotFoundError as error:
    if error.name != "mindspore":
        raise
    raise MissingExtraError(
        "tenterhook.mindspore needs MindSpore, which is not installed; "
        "install it with: pip install 'tenterhook[mindspore]' (MindSpore has wheels up to Python 3.12)"
    ) from error

from tenterhook.backends import _mindspore_load as _load
from tenterhook.backends._mindspore_load import IncompatibleKeys, LoadHookHandle, register_load_post_hook
from tenterhook.backends._mindspore_numpy import warn_about_numpy

__all__ = ["IncompatibleKeys", "LoadHookHandle", "install", "register_load_post_hook", "uninstall"]

_RUN_METHOD = "run_load_param_into_net_post_hook"
_lock = threading.Lock()


def install() -> None:
    """Add the method to ``mindspore.nn.Cell``; importing this module does so. Does nothing if it is there.

    Raises:
        UnsupportedError: The installed MindSpore's loader has an unknown form.
    """
    warn_about_numpy()
    with _lock:
        if hasattr(nn.Cell, _load.METHOD):
            return
        _load.hold_hook_point()
        for name, function in _METHODS.items():
            setattr(nn.Cell, name, function)


def uninstall() -> None:
    """Remove the method, every load hook (those of ``th.hooks`` included), and the change to MindSpore's loader.

    Afterwards MindSpore is as if this module had never been imported. Does nothing a second time. No other thread may
    be loading at that moment.
    """
    with _lock:
        for name, function in _METHODS.items():
            if nn.Cell.__dict__.get(name) is function:
                delattr(nn.Cell, name)
        _load.release_hook_point()


def _register_load_param_into_net_post_hook(self: nn.Cell, hook_fn: Any) -> LoadHookHandle:
    """Run a hook when ``load_param_into_net`` has loaded parameters into this cell or a cell that contains it.

    Args:
        self: The cell to watch.
        hook_fn: Called with ``(cell, incompatible_keys)``; may change the lists ``incompatible_keys.missing_keys`` and
            ``.unexpected_keys`` in place, and must return None.

    Returns:
        A handle, whose ``remove()`` takes the hook off; inert, after a warning, in graph mode.

    Raises:
        HookError: `hook_fn` is not callable.
    """
    return _load.register_load_param_hook(self, hook_fn)


def _run_load_param_into_net_post_hook(self: nn.Cell, missing_keys: list[str], unexpected_keys: list[str]) -> None:
    """Run the hooks of this cell, without those of its children, on two lists.

    Raises:
        HookError: A hook returned something.
    """
    _load.run_hooks_of_cell(self, missing_keys, unexpected_keys)


_METHODS = {
    _load.METHOD: _register_load_param_into_net_post_hook,
    _RUN_METHOD: _run_load_param_into_net_post_hook,
}


install()
