"""The models of a script that knows nothing of being recorded: met as they are called first, watched from then on."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tenterhook.backends import Backend, BeginningBackend
from tenterhook.call_marks import CallMarks
from tenterhook.calls import Watched
from tenterhook.capture import Capture
from tenterhook.errors import SelectionError
from tenterhook.hook_schedule import HookSchedule
from tenterhook.inventory import lenient_matches, model_manifest, modules_rows, watch_model, with_fused
from tenterhook.op_capture import OpCapture
from tenterhook.parameters import ParameterWatch
from tenterhook.reasons import WeightUse
from tenterhook.recording.manifest import Model
from tenterhook.sampling import Sampling
from tenterhook.selection import Entry, check_patterns, resolve

__all__ = ["ScriptModel", "ScriptModels"]


class ScriptModel:
    """One outermost module that the script has called."""

    def __init__(self, backend: Backend, name: str, module: Any, watched: list[Watched]) -> None:
        self.name = name
        self.ref = weakref.ref(module)
        self.watched = watched
        self.structure = [(one.path, one.type) for one in watched]
        self.manifest = model_manifest(module, name, watched)
        self.parameters: ParameterWatch | None = None
        self.looked_at = -1  # step in which its modules were listed again last
        self.weights = WeightUse(backend, module)
        self.fused = backend.fused(module)
        self._blind = backend.blind_spots(module)
        self._evaluated = self._evaluates(backend)

    def _evaluates(self, backend: Backend) -> bool:
        modules = [one.ref() for one in self.watched if one.path in self.fused]
        return any(module is not None and not backend.is_training(module) for module in modules)

    def with_fused(self, told: Sequence[str], backend: Backend) -> list[str]:
        """Add to what is said of the script that modules left the fused path for their hooks, where they have."""
        return with_fused(told, self.watched, self.fused, evaluated=self._evaluated or self._evaluates(backend))

    def rows(self, capture: Capture) -> list[dict[str, Any]]:
        """List the rows of the table of modules."""
        return modules_rows(capture.backend, self.ref(), self.watched, capture, self.weights, blind=self._blind)

    @property
    def calls_in_step(self) -> tuple[int, int]:
        """How often the model itself has been called in the step in which it was called last, and that step."""
        return max(((calls, step) for step, calls in list(self.watched[0].numbers.values())), default=(0, 0))


class ScriptModels:
    """Every model that a script has called so far.

    Args:
        select: patterns; each needs to match in some model of the script only.
        tensors: whether values are kept whole.
        sampling: the rates at which modules are recorded.
        parameters: whether values of parameters are recorded.

    Raises:
        SelectionError: a pattern is malformed.
    """

    def __init__(self, select: Sequence[str] | None, *, tensors: bool, sampling: Sampling, parameters: bool) -> None:
        self._select = list(select) if select else None
        self._tensors = tensors
        self._sampling = sampling
        self._rates = list(sampling.rates) if sampling.by_pattern else []
        self._watches_parameters = parameters
        self._matched: set[str] = set()
        self._by_module: dict[int, Watched] = {}
        self.known: list[ScriptModel] = []
        self.earlier: Counter[tuple[str, str, str]] = Counter()  # (model, path, phase) -> calls of earlier processes
        self.earlier_modules: list[dict[str, Any]] = []  # their rows of the table of modules
        self.strays: Counter[tuple[str, str]] = Counter()  # (type, why it is not recorded) -> calls
        self.ops: OpCapture | None = None
        self.schedule: HookSchedule | None = None  # once a model is met
        self._lock = threading.RLock()  # models are met in whichever thread calls them
        self._late = CallMarks()  # calls of known modules that may run none of the hooks by which these are known
        for pattern in (*(self._select or ()), *self._rates):
            check_patterns(pattern)

    def is_unknown(self, module: Any) -> bool:
        """Whether a module has no hooks of ours."""
        watched = self._by_module.get(id(module))
        return watched is None or watched.ref() is not module

    def wants(self, backend: Backend, module: Any) -> bool:
        """Whether a call that begins is one to take in: that of an unknown module, or one that came just before it was known."""
        if self.is_unknown(module):
            return True
        return bool(self._late) and isinstance(backend, BeginningBackend) and backend.hooked_call() in self._late

    @property
    def parameters(self) -> list[ParameterWatch]:
        """What follows the parameters of the models."""
        return [model.parameters for model in self.known if model.parameters is not None]

    def take_in(self, capture: Capture, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make an unknown module, whose call is beginning, a new model or a new part of the one that is running."""
        with self._lock:
            late = not self.is_unknown(module)  # another thread has made it known meanwhile
            if not late and not self._find_place(capture, module):
                return
        watched = self._by_module.get(id(module))
        if watched is not None and watched.attachment is not None:
            if late and isinstance(capture.backend, BeginningBackend):
                capture.begun.add(capture.backend.hooked_call())
            capture.begin_running_call(watched, module, args, kwargs)
            if self.ops is not None:
                self.ops.begin_running_call()

    def _find_place(self, capture: Capture, module: Any) -> bool:
        running = capture.tracker.settled()
        if running is None:
            self._adopt(capture, module)
        else:
            model = next((one for one in self.known if one.name == running.watched.model), None)
            root = model.ref() if model is not None else None
            if model is None or root is None or not self._join(capture, model, root, module):
                self.strays[type(module).__name__, "not part of a model"] += 1
                return False
        return True

    def _adopt(self, capture: Capture, module: Any) -> None:
        backend = capture.backend
        try:
            backend.check(module)
        except Exception as error:  # a script module, say: it runs unseen, which the summary tells
            self.strays[type(module).__name__, str(error).splitlines()[0]] += 1
            return
        name = type(module).__name__
        model = ScriptModel(backend, name, module, self._list(backend, module, name))
        old = next((one for one in self.known if one.ref() is None and one.structure == model.structure), None)
        if old is not None:
            self._succeed(old, model)
            self._forget(capture, old)
            self.known[self.known.index(old)] = model
        else:
            taken = {one.name for one in self.known}
            number = 2
            while model.name in taken:
                model.name = f"{name}-{number}"
                number += 1
            self.known.append(model)
        model.manifest.name = model.name
        if self._watches_parameters:
            model.parameters = ParameterWatch(capture, module, model.watched)
        self._use_rates()
        for one in model.watched:
            one.model = model.name
            if old is None:
                one.call_count = one.recorded_count = self.earlier[one.model, one.path, "forward"]
                one.gradient_count = self.earlier[one.model, one.path, "backward"]
            self._watch(capture, one)
        self._make_known(capture, model.watched)
        if model.parameters is not None and capture.active and capture.tracker.has_begun:
            model.parameters.step_begins()

    def _list(self, backend: Backend, module: Any, name: str) -> list[Watched]:
        watched = watch_model(backend, module, name, self._select, self._tensors, lenient=True, matched=self._matched)
        if self._rates:
            entries = backend.entries(module)
            by_path = {one.path: one for one in watched}
            for pattern in self._rates:
                for entry in lenient_matches([pattern], entries, self._matched):
                    by_path[entry.path].every = self._sampling.rates[pattern]
        return watched

    def _use_rates(self) -> None:
        if self._rates:
            self._sampling.use({one.every for model in self.known for one in model.watched if one.wanted} or {1})
            if self.schedule is not None:
                self.schedule.again()

    def _succeed(self, old: ScriptModel, new: ScriptModel) -> None:
        """A model of the same make that is gone (``nn.CrossEntropyLoss()(...)`` in a loop) is gone on with under its name."""
        new.name = old.name
        for before, after in zip(old.watched, new.watched, strict=True):
            after.succeed(before)

    def _forget(self, capture: Capture, old: ScriptModel) -> None:
        for one in old.watched:
            if one.attachment is not None:
                one.attachment.remove()
                one.attachment = None
        gone = set(map(id, old.watched))
        capture.watched = [one for one in capture.watched if id(one) not in gone]
        self._by_module = {key: one for key, one in self._by_module.items() if id(one) not in gone}

    def _join(self, capture: Capture, model: ScriptModel, root: Any, module: Any) -> bool:
        """Look whether ``module`` has become part of a known model since that was met; once a step, since it is a long look."""
        if model.looked_at == capture.tracker.step:
            return False
        model.looked_at = capture.tracker.step
        new = [one for one in self._list(capture.backend, root, model.name) if self.is_unknown(one.ref())]
        for one in new:
            model.watched.append(one)
            self._watch(capture, one)
        self._make_known(capture, new)
        return any(one.ref() is module for one in new)

    def _make_known(self, capture: Capture, new: Sequence[Watched]) -> None:
        """Have the calls of modules that have just got their hooks followed by these; last of all, for other threads call them, too.

        A call decides which hooks it runs before it runs the one that asks for unknown modules. What has begun by now may run the new
        ones or not, so it is begun by that one; what begins after this runs them.
        """
        if isinstance(capture.backend, BeginningBackend):
            modules = [module for one in new if (module := one.ref()) is not None]
            for call in capture.backend.beginning(modules):
                self._late.add(call)
        self._by_module |= {id(one.ref()): one for one in new}

    def _watch(self, capture: Capture, watched: Watched) -> None:
        module = watched.ref()
        old = self._by_module.get(id(module))
        if old is not None and old.ref() is module and old.attachment is not None:
            old.attachment.remove()  # it was met by itself before the model that it is part of
            old.attachment = None
        capture.watched.append(watched)
        if self.schedule is not None:
            self.schedule.meet(watched)

    def forget_gone(self) -> None:
        """Let go of the modules that are no more."""
        with self._lock:
            if self.schedule is not None:
                self.schedule.forget_gone()

    # --- the end ---------------------------------------------------------------------------------------------------
    def rows(self, capture: Capture) -> list[dict[str, Any]]:
        """List the rows of the table of modules."""
        rows = []
        for model in self.known:
            rows += model.rows(capture)
        # A model that was called by an earlier process, and not again, has rows of calls, too.
        there, models = {(row["model"], row["path"]) for row in rows}, {model.name for model in self.known}
        for row in self.earlier_modules:
            if (row["model"], row["path"]) not in there and (row["calls"] or row["model"] not in models):
                rows.append(row)
        return rows

    def manifests(self, earlier: Sequence[Model]) -> list[Model]:
        """Describe the models, those too that only an earlier process has called."""
        names = {model.name for model in self.known}
        kept = {row["model"] for row in self.earlier_modules} - names
        return [model.manifest for model in self.known] + [model for model in earlier if model.name in kept]

    def missing(self, rows: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
        """List what was asked for and not seen, with the reasons."""
        several = len(self.known) > 1
        found = [
            (f"{row['model']}/{row['path'] or '(root)'}" if several else row["path"] or "(root)", row["reason"])
            for row in rows
            if row["selected"] and row["reason"]
        ]
        found += [(name, f"{why} (called {count:,} times)") for (name, why), count in self.strays.items()]
        return found + (self.unmatched() if self.known else [])

    def unmatched(self) -> list[tuple[str, str]]:
        """List the patterns that have matched in no model of the script so far, with the nearest names."""
        watched = [one for model in self.known for one in model.watched]
        entries = [Entry(path=one.path, module=None, type_names=(one.type,)) for one in watched]
        missing = []
        for pattern in (*(self._select or ()), *self._rates):
            if not pattern.startswith("!") and pattern not in self._matched:
                try:
                    resolve(pattern, entries)
                except SelectionError as error:
                    _, *hints = str(error).splitlines()
                    missing.append((pattern, "; ".join(["matches nothing", *(line.strip() for line in hints)])))
        return missing
