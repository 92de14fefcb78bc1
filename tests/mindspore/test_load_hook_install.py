"""How load hooks get into MindSpore's loader and out of it, and what else the process must not notice."""

# MindSpore declares the attributes of its cells too loosely for the type checker.
# pyright: reportOptionalCall=false

from __future__ import annotations

import functools
import threading
import types
import warnings
from typing import Any

import pytest
from mindspore import load_param_into_net as early_import
from mindspore import nn
from mindspore.common.hook_handle import HookHandle
from mindspore.train import serialization

import tenterhook as th
import tenterhook.mindspore as thms
from tenterhook.backends import _mindspore_load, _mindspore_loader, _mindspore_numpy
from tenterhook.errors import MissingExtraError, UnsupportedError
from tests.mindspore.loading import (
    CODE_AT_FIRST,
    LOADER,
    METHOD,
    SOURCE_AT_FIRST,
    Net,
    Seen,
    assert_untouched,
    run_python,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("load_hooks_installed")


def test_a_hook_keeps_its_cell_alive_no_longer_than_the_user_does() -> None:
    # In a process of its own, because the fixture that looks for leaks itself keeps handles alive.
    program = """
        import functools, gc, weakref
        import tenterhook.mindspore as thms
        from mindspore import nn

        def note(noted, cell, keys):
            assert noted is cell

        net = nn.SequentialCell(nn.Dense(2, 2))
        # A hook that refers to its own cell, as a bound method or a closure does.
        handles = [
            net.register_load_param_into_net_post_hook(functools.partial(note, net)),
            thms.register_load_post_hook(net, functools.partial(note, net)),
        ]
        assert all(handle.live for handle in handles)
        gone = weakref.ref(net)
        del net
        gc.collect()
        assert gone() is None
        assert not any(handle.live for handle in handles)
        for handle in handles:
            handle.remove()
        print("done")
    """
    assert run_python(program).stdout == "done\n"


def test_the_hook_for_both_loaders_needs_no_installation_and_leaves_nothing() -> None:
    thms.uninstall()
    net, seen = Net(), Seen()
    attributes = dict(vars(net))
    handle = thms.register_load_post_hook(net, seen)
    assert not hasattr(net, METHOD)
    early_import(net, weights_of(net))
    handle.remove()
    assert_untouched()
    assert vars(net) == attributes
    assert len(seen.calls) == 1


def test_uninstall_undoes_everything_and_install_brings_it_back() -> None:
    net, seen = Net(), Seen()
    handle = net.register_load_param_into_net_post_hook(seen)
    both = thms.register_load_post_hook(net, seen)
    thms.uninstall()
    thms.uninstall()
    assert_untouched()
    assert not hasattr(nn.Cell, METHOD)
    assert not handle.live
    assert not both.live
    early_import(net, weights_of(net))
    assert seen.calls == []
    thms.install()
    thms.install()
    net.register_load_param_into_net_post_hook(seen)
    early_import(net, weights_of(net))
    assert len(seen.calls) == 1


def test_a_native_method_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    thms.uninstall()
    taken: list[tuple[Any, Any]] = []

    def native(self: nn.Cell, hook_fn: Any) -> HookHandle:
        taken.append((self, hook_fn))
        return HookHandle()

    with monkeypatch.context() as patch:
        patch.setattr(nn.Cell, METHOD, native, raising=False)
        thms.install()
        assert nn.Cell.__dict__[METHOD] is native
        assert LOADER.__code__ is CODE_AT_FIRST
        net = Net()
        handle = thms.register_load_post_hook(net, Seen())
        assert [cell for cell, _ in taken] == [net]
        handle.remove()
        thms.uninstall()
        assert nn.Cell.__dict__[METHOD] is native


def test_a_loader_of_unknown_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    thms.uninstall()

    def load_param_into_net(net: Any, parameter_dict: Any) -> None:
        net.load(parameter_dict)

    with monkeypatch.context() as patch:
        patch.setattr(serialization, "load_param_into_net", load_param_into_net)
        with pytest.raises(UnsupportedError, match="does not use param_not_load, ckpt_not_load"):
            thms.install()
        patch.setattr(serialization, "load_param_into_net", len)
        with pytest.raises(UnsupportedError, match="builtin_function_or_method, not a Python function"):
            thms.register_load_post_hook(Net(), print)
    assert_untouched()


def test_a_source_that_is_not_what_runs_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    thms.uninstall()
    lines, first = SOURCE_AT_FIRST
    edited = [line.replace("param_loaded = set()", "param_loaded = {1}") for line in lines]
    assert edited != lines
    monkeypatch.setattr(_mindspore_loader.inspect, "findsource", lambda _: (edited, first))
    thms.install()
    assert LOADER.__code__ is CODE_AT_FIRST
    net, seen = Net(), Seen()
    net.register_load_param_into_net_post_hook(seen)
    early_import(net, weights_of(net))
    assert seen.calls == [(net, [], [])]


def test_a_later_change_by_others_is_not_overwritten(request: pytest.FixtureRequest) -> None:
    ours_code, ours_walk = LOADER.__code__, nn.Cell.__dict__["parameters_and_names"]
    LOADER.__code__ = ours_code.replace(co_name="patched")
    patched: Any = functools.partialmethod(ours_walk)
    nn.Cell.parameters_and_names = patched
    with pytest.warns(RuntimeWarning, match="changed by somebody else"):
        thms.uninstall()
    LOADER.__code__, nn.Cell.parameters_and_names = ours_code, ours_walk
    thms.uninstall()
    assert_untouched()


def test_tracebacks_still_point_into_mindspores_source() -> None:
    net = Net()
    net.register_load_param_into_net_post_hook(lambda cell, keys: {}["absent"])
    with pytest.raises(KeyError) as caught:
        early_import(net, weights_of(net))
    in_loader = [entry for entry in caught.traceback if entry.frame.code.name == "load_param_into_net"]
    assert [str(entry.path) for entry in in_loader] == [serialization.__file__]
    lines = [line for *_, line in CODE_AT_FIRST.co_lines() if line is not None]
    assert min(lines) <= in_loader[0].lineno + 1 <= max(lines)
    assert LOADER.__code__.co_firstlineno == CODE_AT_FIRST.co_firstlineno


def test_threads_that_load_register_and_remove_do_not_disturb_each_other() -> None:
    nets = [Net() for _ in range(4)]
    wrong: list[BaseException] = []

    def work(net: Net) -> None:
        try:
            given = weights_of(net)
            for _ in range(10):
                seen = Seen()
                with net.register_load_param_into_net_post_hook(seen), thms.register_load_post_hook(net.head, seen):
                    early_import(net, given)
                assert [cell for cell, *_ in seen.calls] == [net.head, net]
        except BaseException as error:  # handed to the main thread, whatever it is
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(net,)) for net in nets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_without_mindspore_the_error_says_what_to_install() -> None:
    program = """
        import sys
        sys.modules["mindspore"] = None
        import tenterhook.mindspore
    """
    run = run_python(program)
    assert run.returncode == 1
    assert MissingExtraError.__name__ in run.stderr
    assert "pip install 'tenterhook[mindspore]'" in run.stderr


def test_numpy_2_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_mindspore_numpy, "numpy", types.SimpleNamespace(__version__="2.4.6"))
    monkeypatch.setattr(_mindspore_numpy, "_warned", set())
    with pytest.warns(RuntimeWarning, match=r"numpy 2\.4\.6 .* pip install 'numpy<2' 'pyarrow<26'") as told:
        thms.install()
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        thms.install()
        th.record(Net())


def test_only_cells_of_the_loaded_net_are_told() -> None:
    net, other, seen = Net(), Net(), Seen()
    other.register_load_param_into_net_post_hook(seen)
    early_import(net, weights_of(net))
    assert seen.calls == []
    assert len(_mindspore_load._entries) == 1
