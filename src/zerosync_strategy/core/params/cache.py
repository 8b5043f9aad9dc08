"""ZeRO-3: parameters gathered once and held over the window, up to a budget of bytes.

DeepSpeed releases a parameter after each use and gathers it again for the next: at every micro-batch, though its values
change only in the optimizer step. A held parameter stays, and DeepSpeed's own step releases it, so that the next window
gathers the new values. Which are held: all if the budget allows, else those that save most bytes per byte held, which
are those that the first window gathered most often.

Where all parameters of a module are held, DeepSpeed's hooks around it do not run, and cost nothing (H2): a hook of ours
looks whether they are there. They are gathered in *buckets*, runs of the parameters of one process group in the order
in which they were built, and each module waits for its own buckets (U2). Where all parameters of the model are held,
the first module that needs one in a window sets all buckets out, so that no later one communicates, and ranks may run
different modules (W6). Else a module sets out its own buckets and the next, in the order of U1; DeepSpeed's record of
the order of modules has the other modules alone; which those are changes between two windows, and the record is then
made anew.

A parameter that no optimizer trains is not released by a step, and so crosses the wire once (R4); checkpoints, which
read and write shards, release it.

What does not fit may be kept in the memory of the host (``host_cache.py``): among the others, those that save most.

Others may release a held parameter: a ``GatheredParameters`` context that writes, a checkpoint. The module's hooks see
it before and after its forward, and what a backward may need is looked through when the backward begins.

The cache also cures a stale memo. DeepSpeed 0.19.8 remembers what to release after each module, by the module's place
in the recorded order, and keeps that when the order is recorded anew: after a validation before the first backward, it
releases every parameter after each forward for good and gathers it again for the backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from zerosync_strategy.core.engine import autograd_functions, compilation, gathering, param_class, shared, zero3
from zerosync_strategy.core.engine.interpose import interpose, restore
from zerosync_strategy.core.engine.overrides import ReleaseOverrides
from zerosync_strategy.core.params.host_cache import HostCache, fitting
from zerosync_strategy.core.params.scheduler import GatherScheduler

AHEAD = 2
"""Buckets that are gathered ahead of their use, where not all parameters are held."""


@dataclass
class _Bucket:
    """Parameters that are gathered by one message.

    Attributes:
        place: among all buckets; those of a process group follow each other.
        group: the place of the process group in the order of gathers (U1).
        params: in the order in which they were built.
        window: in which it was looked through last, and what was missing was gathered.
        handles: of its gather in this window, until the next.
        in_flight: nobody has waited for it yet.
    """

    place: int
    group: int
    params: list[Any]
    window: int = -1
    handles: list[Any] = field(default_factory=list)
    in_flight: bool = False


@dataclass
class _HeldModule:
    """A module whose parameters are all held or persistent.

    Attributes:
        params: that it needs.
        buckets: that they are in, in their order.
        window: in which it has waited for them last.
        arriving: they may not be there yet on a stream on which it has not run.
    """

    params: list[Any]
    buckets: list[_Bucket]
    window: int = -1
    arriving: bool = False


class ParameterCache:
    """Keeps parameters of a ZeRO-3 engine gathered from their first use in a window to the optimizer step.

    Args:
        engine: the DeepSpeed engine.
        budget: bytes of gathered parameters to hold beyond DeepSpeed's own persistent ones; ``None``: no limit.
        host_budget: bytes of those that are not held to keep in the memory of the host; ``None``: no limit.
        automatic: the budget will be set by :meth:`set_budget`.
        scheduler: gathers them.
        untraced: compilers will see no hooks of the modules in any case.
        is_constant: whether no optimizer trains a parameter.

    Attributes:
        host: has what is kept in the memory of the host; ``None``: nothing is.
        peak_bytes: the most bytes held at once since the last :meth:`end_window`.
        release_memo: DeepSpeed's memo of what to release after which module.
    """

    def __init__(
        self, engine: Any, budget: int | None, host_budget: int | None, automatic: bool, scheduler: GatherScheduler,
        untraced: bool, is_constant: Callable[[Any], bool],
    ) -> None:  # fmt: skip
        self._engine = engine
        self._untraced = untraced
        self.host = scheduler.host = None if host_budget == 0 else HostCache(host_budget, scheduler.streams)
        self._budget = budget
        self._scheduler = scheduler
        self._chosen: set[int] | None = None  # unknown until the first window has ended, unless all are held or none
        self._gathers: Counter[Any] = Counter()  # in the windows that were counted
        self._counted_windows = 0
        self._counts = budget is not None
        self._automatic = automatic
        self._held: dict[int, Any] = {}  # gathered since the last step, by id; others may have released some since
        self._held_bytes = self.peak_bytes = 0
        self._window = 0
        self._model_runs = False  # of the whole model: gather ahead
        self._releasing_all = False
        self._gathers_nothing = False  # all parameters are there, for a phase without backwards
        self._is_constant = is_constant
        self._constant: set[Any] | None = None  # parameters that no step changes, once they are known
        self._steps = False  # an optimizer step is under way
        self._kept: set[Any] = set()  # by the last step: they are there from a window before this one
        self._were_kept: set[Any] = set()  # by the step before
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._modules: dict[Any, _HeldModule] = {}
        self._hooks: list[compilation.ModuleHook] = []
        self._has_empty = any(zero3.full_numel(param) == 0 for param in engine.module.parameters())
        self._coordinator = gathering.coordinator(engine.optimizer)
        self.release_memo = gathering.release_cache(self._coordinator)
        self._coordinator._zerosync_releases = self
        interpose(self._coordinator, ReleaseOverrides)
        autograd_functions.use_quick_linear()
        for module in engine.module.modules():
            autograd_functions.quicken(module)
        if budget == 0 and not automatic:
            self._counts = self.host is not None
            self._chosen = None if self._counts else set()
            return
        self._hooks = self._extend_hooks()
        scheduler.before_read = self.before_read
        if budget is None:
            self._hold_modules()

    def _extend_hooks(self) -> list[compilation.ModuleHook]:
        hooks = compilation.module_hooks(self._engine)
        self._registered = compilation.registered_hooks(self._engine)
        extend = {"before": self._before, "after": self._after, "backward": self._before_backward}
        for hook in hooks:
            if hook.when in extend:
                extended = extend[hook.when](hook.stock)
                hook.replace(extended if self._untraced else torch.compiler.disable(extended))
        return hooks

    def renew_hooks(self) -> bool:
        """Extend DeepSpeed's hooks where others have removed them and registered them anew; return whether they have.

        TRL does so when it generates.
        """
        if not self._hooks or self._registered is compilation.registered_hooks(self._engine):
            return False
        self._hooks = self._extend_hooks()
        return True

    @classmethod
    def of(
        cls, engine: Any, budget: int | None, host_budget: int | None, automatic: bool, scheduler: GatherScheduler,
        untraced: bool, is_constant: Callable[[Any], bool],
    ) -> ParameterCache:  # fmt: skip
        """Return the cache of this engine; engines over one module share one, with the budgets of the first.

        Raises:
            ValueError: the budget is automatic, and the module has another engine.
        """
        coordinator = gathering.coordinator(engine.optimizer)

        def make() -> ParameterCache:
            return cls(engine, budget, host_budget, automatic, scheduler, untraced, is_constant)

        cache = shared.acquire(coordinator, "cache", make)
        if cache._engine is not engine and (automatic or cache._automatic):
            shared.release(coordinator, "cache")
            raise ValueError(
                "ZeroSync option 'param_memory_budget' got \"auto\" with several optimizers for one module. Their"
                " windows overlap, so that what is held cannot change between two. Give a size."
            )
        cache._constant = None  # this engine may train what the others do not
        return cache

    def detach(self) -> None:
        """The engine needs the cache no longer. With the last, DeepSpeed releases parameters as it always did."""
        if not shared.release(self._coordinator, "cache"):
            return
        self.release_kept()
        self.wait_for_all()
        param_class.mark_held(self._held.values(), False)
        zero3.mark_kept((param for bucket in self._buckets for param in bucket.params), False)
        for hook in self._hooks:
            hook.replace(hook.stock)
        self._scheduler.before_read = self._scheduler.host = None
        restore(self._coordinator, ReleaseOverrides)
        del self._coordinator._zerosync_releases
        for module in self._engine.module.modules():
            autograd_functions.undo_quicken(module)
        if self._modules:
            gathering.forget_order(self._engine.optimizer)

    def end_window(self, params: Iterable[Any]) -> None:
        """A step has released ``params``, but for those that it has kept."""
        params = [param for param in params if param not in self._kept]
        for param in params:
            if self._held.pop(zero3.param_id(param), None) is not None:
                self._held_bytes -= zero3.full_bytes(param)
        param_class.mark_held(params, False)
        self.peak_bytes = self._held_bytes
        self._window += 1
        if self._counts and self._gathers:
            self._counted_windows += 1
            if not self._automatic:
                self._counts = False
                self._choose(self._budget or 0)
                if self._budget:
                    self._hold_modules()
        if self.host is not None:
            self.host.end_window()

    def _choose(self, budget: int) -> None:
        constants = self._constants()
        # The order must be the same on all ranks; ids are.
        by_saving = sorted(
            (
                (gathers - (param not in constants) * self._counted_windows, param)
                for param, gathers in self._gathers.items()
            ),
            key=lambda item: (-item[0], -zero3.full_bytes(item[1]), zero3.param_id(item[1])),
        )
        saving = [param for saved, param in by_saving if saved > 0 and not zero3.is_persistent(param)]
        held = fitting(saving, budget)
        self._chosen = set(map(zero3.param_id, held))
        if self.host is not None:
            others = (param for param in saving if not self.holds(param) and self._scheduler.gathers_plainly(param))
            self.host.choose(set(self.host.fitting(others)), (param for param in held if param in constants))

    def set_budget(self, budget: int) -> int:
        """Hold what fits into ``budget`` bytes from the coming window on, and return how many it takes.

        Between two windows. A model that fits is held in full.
        """
        self._counts = False
        self.wait_for_all()
        params = list(filter(zero3.is_sharded, self._engine.module.parameters()))
        had_modules = bool(self._modules)
        if self._budget is None:
            zero3.mark_kept(params, False)
        self._buckets, self._bucket_of, self._modules, self._chosen = [], {}, {}, None
        self._budget = None if self.everything <= budget else budget
        if self._budget is not None:
            self._choose(budget)
        elif self.host is not None:
            self.host.choose(set(), self._constants())
        leaving = [param for param in self._held.values() if not self.holds(param)]
        for param in leaving:
            del self._held[zero3.param_id(param)]
            self._held_bytes -= zero3.full_bytes(param)
        self._kept.difference_update(leaving)
        self._release(leaving)
        self.peak_bytes = self._held_bytes
        if self._budget != 0:
            self._hold_modules()
        if had_modules and not self._modules:
            gathering.forget_order(self._engine.optimizer)
        return sum(zero3.full_bytes(param) for param in params if self.holds(param) and not zero3.is_persistent(param))

    @property
    def _concurrent(self) -> bool:
        return self._scheduler.streams.concurrent

    @property
    def held_bytes(self) -> int:
        """Bytes that are held now."""
        return self._held_bytes

    @property
    def everything(self) -> int:
        """Bytes of all parameters that may be held."""
        params = filter(zero3.is_sharded, self._engine.module.parameters())
        return sum(zero3.full_bytes(param) for param in params if not zero3.is_persistent(param))

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Around forwards without backwards: all parameters are there, and no module communicates. Collective.

        What is not held is released at the end; what DeepSpeed knows of the order of modules stays as it is.
        """
        if self._budget is None:
            self._gather_all()
            self.wait_for_all()
            yield
            return
        self.wait_for_all()
        hooks = [] if self._hooks else self._extend_hooks()
        released = [param for param in self._engine.module.parameters() if zero3.is_sharded(param)]
        released = [param for param in released if zero3.is_released(param)]
        for _, runs in self._scheduler.runs(released):
            for handle in [handle for run in runs for handle in self._scheduler.fetch(run)]:
                handle.wait()
        gathering.count_gathered(self._coordinator, released)  # which their release takes back
        param_class.mark_held(released, True)
        before, params = self._modules, {}
        for module in self._engine.module.modules():
            params[module] = [param for param in gathering.parameters_of(module) if zero3.is_sharded(param)]
        self._modules = {module: _HeldModule(of_module, [], self._window) for module, of_module in params.items()}
        self._gathers_nothing = True
        try:
            yield
        finally:
            self._gathers_nothing = False
            self._modules = before
            for hook in hooks:
                hook.replace(hook.stock)
            self._release(released)

    def holds(self, param: Any) -> bool:
        """Return whether ``param`` stays gathered from its first use in this window to the step."""
        return (
            self._gathers_nothing
            or self._budget is None
            or (self._chosen is not None and zero3.param_id(param) in self._chosen)
        )

    @property
    def holds_all(self) -> bool:
        """Whether no module gathers anything between the first of a window and its step.

        Not where all others are persistent: DeepSpeed releases those too while it records the order of modules.
        """
        return self._budget is None

    def gathers_in(self, param: Any, backwards: int) -> int:
        """Return how often a window of so many backwards has to gather ``param``: the one that a step has ended."""
        if param in self._were_kept or (self.host is not None and self.host.was_there(param)):
            return 0
        once = zero3.is_persistent(param) or self.holds(param) or (self.host is not None and self.host.keeps(param))
        return 1 if once else backwards

    # ---- modules whose parameters are all held ---------------------------------------------------------------------

    def _hold_modules(self) -> None:
        """From here on, DeepSpeed's hooks do not run for modules whose parameters are all held."""
        root = self._engine.module
        stays = {id(param) for param in root.parameters() if zero3.is_persistent(param) or self.holds(param)}
        below_leaves = {
            id(below) for leaf in root.modules() for below in gathering.modules_of(leaf) if below is not leaf
        }
        held = {}
        for module in root.modules():
            params = [param for param in gathering.parameters_of(module) if zero3.is_sharded(param)]
            # DeepSpeed may come to gather for the model, or a module without parameters, what is in another's output.
            # A module below a leaf has no hooks.
            has_hooks = params and module is not root and id(module) not in below_leaves
            if self._budget is None or (has_hooks and all(id(param) in stays for param in params)):
                held[module] = sorted(params, key=zero3.param_id)
        by_id = {zero3.param_id(param): param for params in held.values() for param in params}
        if self._budget is None:  # else a weight may also be that of a module whose other parameters are not held
            zero3.mark_kept(by_id.values(), True)
        for trains in (True, False):  # apart, since those that are frozen are gathered once
            params = [param for param in by_id.values() if param.requires_grad == trains]
            for group, ordered in self._scheduler.runs(params):
                for run in ordered:
                    bucket = _Bucket(len(self._buckets), group, run)
                    self._buckets.append(bucket)
                    self._bucket_of.update((zero3.param_id(param), bucket) for param in run)
        for module, params_of_module in held.items():
            places = {self._bucket_of[zero3.param_id(param)].place for param in params_of_module}
            self._modules[module] = _HeldModule(params_of_module, [self._buckets[place] for place in sorted(places)])
        if self._modules:
            gathering.forget_order(self._engine.optimizer)

    def _before(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def hook(module: Any, *args: Any) -> Any:
            if module is self._engine.module:
                self._model_runs = True
            try:
                held = self._modules[module]
            except KeyError:
                return stock(module, *args)
            if self._budget is not None:  # others gather in the backward
                self._scheduler.order.begins(module)
            if held.window != self._window or not zero3.all_gathered(held.params):
                self._gather(held)
            elif held.arriving:
                self._wait_on_this_stream(held)
            return None

        return hook

    def _after(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def hook(module: Any, *args: Any) -> Any:
            if module is self._engine.module:
                self._model_runs = False
                self.wait_for_all()
            try:
                held = self._modules[module]
            except KeyError:
                return stock(module, *args)
            if not zero3.all_gathered(held.params):
                self._gather(held)  # for the backward: the forward has released some
            return None

        return hook

    def _before_backward(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def hook(module: Any, *args: Any) -> Any:
            return None if module in self._modules else stock(module, *args)

        return hook

    def skip_backward_hooks(self) -> None:
        """Where all modules are held, do nothing of what DeepSpeed, and what is around its hooks, does for backwards.

        Called once everything that is around them is there.
        """
        if self._budget is None:
            for hook in self._hooks:
                if hook.when == "backward":
                    hook.replace(_nothing)

    def _gather(self, held: _HeldModule) -> None:
        """Let the parameters of a module arrive, and those that follow them set out."""
        if self._budget is None:
            self._gather_all()
        complete = zero3.all_gathered(held.params)
        turn = {bucket.place: bucket for bucket in held.buckets if not complete or bucket.window != self._window}
        if self._model_runs and self._budget is not None:
            for bucket in held.buckets:
                for ahead in self._buckets[bucket.place + 1 : bucket.place + 1 + AHEAD]:
                    if ahead.group == bucket.group and ahead.window != self._window:
                        turn[ahead.place] = ahead
        for place in sorted(turn):
            self._issue(turn[place])
        for bucket in held.buckets:
            self._wait(bucket)
        held.window = self._window
        held.arriving = self._concurrent

    def _wait_on_this_stream(self, held: _HeldModule) -> None:
        """Let a module that has run in this window run on any stream, as long as the host sees gathers in progress."""
        held.arriving = False
        for bucket in held.buckets:
            if not all(handle.is_complete() for handle in bucket.handles):
                held.arriving = True
                self._wait(bucket)

    def _gather_all(self) -> None:
        """Let all buckets set out that did not in this window: on every rank the same, whatever it runs first (W6)."""
        for bucket in self._buckets:
            if bucket.window != self._window:
                self._issue(bucket)

    def _issue(self, bucket: _Bucket) -> None:
        if bucket.in_flight:
            return
        bucket.window = self._window
        missing = [param for param in bucket.params if zero3.is_released(param)]
        if missing:
            bucket.handles = self._scheduler.fetch(missing)
            bucket.in_flight = True
            self._record(missing)

    def _wait(self, bucket: _Bucket) -> None:
        for handle in bucket.handles:
            handle.wait()
        bucket.in_flight = False

    def _record(self, params: Iterable[Any]) -> None:
        """``params`` are gathered, or about to be, and stay so."""
        for param in params:
            number = zero3.param_id(param)
            if number not in self._held and not zero3.is_persistent(param):
                self._held[number] = param
                self._held_bytes += zero3.full_bytes(param)
                if self.host is not None:
                    self.host.free((param,))
        param_class.mark_held(params, True)
        self.peak_bytes = max(self.peak_bytes, self._held_bytes)

    # ---- around forwards, backwards and steps ----------------------------------------------------------------------

    def wait_for_all(self) -> None:
        """Nothing that is held is in flight any more: others than the modules' own hooks may use and release it."""
        for bucket in self._buckets:
            if bucket.in_flight:
                self._wait(bucket)

    def backward_begins(self) -> None:
        """A backward uses what the forwards of this window have used; it is there, whoever has released it since."""
        if not self._held:
            return
        self.wait_for_all()
        if not zero3.all_gathered(self._held.values()):
            missing = {bucket.place for bucket in map(self._bucket_of.get, self._held) if bucket is not None}
            for place in sorted(missing):
                self._issue(self._buckets[place])
            self.wait_for_all()

    def before_read(self, param: Any) -> None:
        """A reader whom no hook serves finds what is held."""
        bucket = self._bucket_of.get(zero3.param_id(param))
        if bucket is not None:
            if self._budget is None:
                self._gather_all()
            self._issue(bucket)
            self._wait(bucket)

    # ---- what DeepSpeed's coordinator calls, for the other modules -------------------------------------------------

    @property
    def has_no_order(self) -> bool:
        return self._gathers_nothing or (self._budget is None and not gathering.in_flight(self._coordinator))

    def order_forgotten(self) -> None:
        self.release_memo.cache_clear()

    def fetching(self, module: Any) -> None:
        for param in gathering.parameters_of(module) if self._has_empty else ():
            if zero3.is_released(param):
                gathering.gather_empty(param)
        if self._counts:
            self._gathers.update(param for param in gathering.parameters_of(module) if not zero3.is_gathered(param))

    def release(self, param: Any) -> bool:
        if self._budget != 0 and not self._releasing_all and self.holds(param) and zero3.is_gathered(param):
            self._record((param,))
            return True
        return gathering.release(self._coordinator, param)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Around an optimizer step: of what it does not change, what is held stays."""
        self._steps = True
        try:
            yield
        finally:
            self._steps = False
            if self.host is not None:
                self.host.expire(but=self._constants())

    def release_for_step(self) -> bool:
        """Release what an optimizer step that is under way changes; return whether that is all there is to release."""
        if not self._steps:
            return False
        self._were_kept, self._kept = self._kept, set(filter(self._stays, self._constants()))
        if not self._kept:
            return False
        with self.releasing_all():
            gathering.release_but(self._coordinator, self._engine.module, self._kept)
        return True

    @contextmanager
    def releasing_all(self) -> Iterator[None]:
        self.wait_for_all()
        self._releasing_all = True
        try:
            yield
        finally:
            self._releasing_all = False

    def _constants(self) -> set[Any]:
        if self._constant is None:
            params = filter(zero3.is_sharded, self._engine.module.parameters())
            self._constant = set(filter(self._is_constant, params))
        return self._constant

    def _stays(self, param: Any) -> bool:
        is_kept = zero3.is_persistent(param) or zero3.param_id(param) in self._held
        return is_kept and zero3.is_gathered(param)

    def release_kept(self) -> None:
        """Release what steps have kept: shards are about to be read or written."""
        if not self._kept:
            return
        held, self._kept = self._kept, set()
        kept = [param for param in held if self._held.pop(zero3.param_id(param), None) is not None]
        self._held_bytes -= sum(map(zero3.full_bytes, kept))
        self._release(kept)

    def _release(self, params: Iterable[Any]) -> None:
        with self.releasing_all():
            for param in params:
                gathering.release_param(self._coordinator, param)
        param_class.mark_held(params, False)


def _nothing(module: Any, *args: Any) -> None:
    """A hook that compilers may trace."""
