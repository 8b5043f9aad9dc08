"""ZeRO-3: parameters unsharded once and held over the window (``held.py``): how modules find them.

DeepSpeed reshards a parameter after each use and gathers it again at every micro-batch, though its values change only
in the optimizer step. A held parameter stays until DeepSpeed's own step reshards it.

Where all parameters of a module are held, DeepSpeed's hooks around it do not run, and cost nothing (H2): a hook of ours
looks whether they are there. They are gathered in *buckets*, runs of the parameters of one process group in the order
in which they were built, and each module waits for its own (U2). Where all parameters of the model are held, the first
module that needs one in a window issues all gathers, so that no later one communicates, and ranks may run different
modules (W6). Else a module issues its own buckets and the next, in the order of U1; DeepSpeed's record of the order of
modules has the other modules alone, and is made anew between two windows when these change.

Others may reshard a held parameter: a ``GatheredParameters`` context that writes, a checkpoint. The module's hooks see
it before and after its forward, and what a backward may need is looked through when the backward begins.

The cache also cures a stale memo. DeepSpeed 0.19.8 remembers what to release after each module by its place in the
recorded order, and keeps that when the order is recorded anew: after a validation before the first backward, it
releases every parameter after each forward for good.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from zerosync_strategy.core.comm.collectives import InFlight
from zerosync_strategy.core.engine import autograd_functions, compilation, gathering, zero3
from zerosync_strategy.core.engine.interpose import replaced
from zerosync_strategy.core.engine.parameter import STEPS, Claim, Record
from zerosync_strategy.core.params.held import HoldPlan
from zerosync_strategy.core.params.held_modules import Bucket, HeldModule, held_modules
from zerosync_strategy.core.params.scheduler import GatherScheduler

AHEAD = 2
"""Buckets that are gathered ahead of their use, where not all parameters are held."""


class ParameterCache:
    """Keeps parameters of a ZeRO-3 engine unsharded from their first use in a window to the optimizer step.

    ``untraced``: compilers will see no hooks of the modules in any case. :attr:`release_memo` is DeepSpeed's memo of
    what to release after which module.
    """

    def __init__(self, engine: Any, scheduler: GatherScheduler, plan: HoldPlan, untraced: bool) -> None:
        self._engine, self._scheduler, self.plan, self._untraced = engine, scheduler, plan, untraced
        self._coordinator = scheduler.coordinator
        self._model_runs = False  # of the whole model: gather ahead
        self._releases_all = False
        self._steps = False  # an optimizer step is under way
        self._infers = False  # all parameters are there, for a phase without backwards
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[Record, Bucket] = {}
        self._modules: dict[Any, HeldModule] = {}
        self._in_flight: list[InFlight] = []
        self._hooks: list[compilation.ModuleHook] = []
        self._has_empty = any(zero3.full_numel(record.param) == 0 for record in plan.records)
        self.release_memo = gathering.release_cache(self._coordinator)
        autograd_functions.use_quick_linear()
        for module in engine.module.modules():
            autograd_functions.give_own(module)
            autograd_functions.quicken(module)
        if plan.budget != 0 or plan.automatic:
            self._hooks = self._extend_hooks()
            scheduler.before_read = self.before_read
            if plan.holds_all:
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
        """Extend DeepSpeed's hooks where others, as TRL, have registered them anew; return whether they have."""
        if not self._hooks or self._registered is compilation.registered_hooks(self._engine):
            return False
        self._hooks = self._extend_hooks()
        return True

    def detach(self) -> None:
        """From here on, DeepSpeed releases parameters as it always did."""
        self.release_constants()
        self.wait_for_all()
        self.plan.drop(self.plan.records)
        for hook in self._hooks:
            hook.replace(hook.stock)
        self._scheduler.before_read = None
        for module in self._engine.module.modules():
            autograd_functions.undo_quicken(module)
        if self._modules:
            gathering.forget_order(self._engine.optimizer)

    def end_window(self, params: Iterable[Any]) -> None:
        """A step has resharded ``params``, but for those that it does not change."""
        records = [param._zerosync_record for param in params]
        self.plan.drop(record for record in records if not record.bits & STEPS)
        self._begin_window()
        if self.plan.count_window():
            self._hold_modules()
        self.plan.reset_counts()

    def _begin_window(self) -> None:
        for bucket in self._buckets:
            bucket.issued = False
        for held in self._modules.values():
            held.pending = True
        self._in_flight = [gather for gather in self._in_flight if not gather.is_done]

    def set_budget(self, budget: int) -> tuple[int, int]:
        """Hold what fits into ``budget`` bytes from the coming window on, where nothing was held before.

        Between two windows. A model that fits is held in full. Return the bytes that are held in full, and those of
        node shards within the budget.
        """
        self.plan.set_budget(budget)
        if self.plan.budget != 0:
            self._hold_modules()
        held = (record.param for record in self.plan.records if record.hold)
        in_full = sum(zero3.full_bytes(param) for param in held if not zero3.is_persistent(param))
        return in_full, self.plan.chosen_in_shards

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Around forwards without backwards: all parameters are there, and no module communicates. Collective.

        What is not held is resharded at the end; what DeepSpeed knows of the order of modules stays as it is.
        """
        if self.plan.holds_all:
            self._issue_all()
            self.wait_for_all()
            yield
            return
        self.wait_for_all()
        hooks = [] if self._hooks else self._extend_hooks()
        records = [record for record in self.plan.records if zero3.is_released(record.param)]
        params = [record.param for record in records]
        issued = [self._scheduler.fetch(run) for _, runs in self._scheduler.runs(params) for run in runs]
        for gather in itertools.chain.from_iterable(issued):
            gather.wait()
        gathering.count_gathered(self._coordinator, params)  # which their release takes back
        for record in records:
            record.claim(Claim.PHASE)
        modules = self._modules
        self._modules = {
            module: HeldModule(list(filter(zero3.is_sharded, gathering.parameters_of(module))), [])
            for module in self._engine.module.modules()
        }
        self._infers = True
        try:
            yield
        finally:
            self._infers = False
            self._modules = modules
            for hook in hooks:
                hook.replace(hook.stock)
            self._release(records)

    def holds(self, param: Any) -> bool:
        """Return whether ``param`` stays unsharded from its first use in this window to the step."""
        return self._infers or bool(param._zerosync_record.hold)

    # ---- modules whose parameters are all held ---------------------------------------------------------------------

    def _hold_modules(self) -> None:
        """From here on, DeepSpeed's hooks do not run for modules whose parameters are all held."""
        self._buckets, self._modules = held_modules(self._engine.module, self.plan, self._scheduler)
        self._bucket_of = {param._zerosync_record: bucket for bucket in self._buckets for param in bucket.params}
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
            if self.plan.budget is not None:  # others gather in the backward
                self._scheduler.order.begins(module)
            if held.pending or not zero3.all_gathered(held.params):
                self._unshard(held)
                if held.pending:
                    for param in held.params:
                        param._zerosync_record.use()
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
                self._unshard(held)  # for the backward: the forward has resharded some
            if held.pending:
                for param in held.params:
                    param._zerosync_record.settle()
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
        if self.plan.holds_all:
            for hook in self._hooks:
                if hook.when == "backward":
                    hook.replace(_nothing)

    def _unshard(self, held: HeldModule) -> None:
        """Let the parameters of a module be there for the current stream, and issue the gathers of the next."""
        if self.plan.holds_all:
            self._issue_all()
        complete = zero3.all_gathered(held.params)
        turn = {bucket.place: bucket for bucket in held.buckets if not (complete and bucket.issued)}
        if self._model_runs and not self.plan.holds_all:
            for bucket in held.buckets:
                for ahead in self._buckets[bucket.place + 1 : bucket.place + 1 + AHEAD]:
                    if ahead.group == bucket.group and not ahead.issued:
                        turn[ahead.place] = ahead
        for place in sorted(turn):
            self._issue(turn[place])
        gathers = dict.fromkeys(param._zerosync_record.gather for param in held.params)
        pending = [gather for gather in gathers if gather is not None and not gather.is_complete]
        for gather in pending:
            gather.wait()
        held.pending = not all(gather.is_complete for gather in pending)

    def _issue_all(self) -> None:
        """Issue the gathers of all buckets that are missing in this window: on every rank alike, whatever runs (W6)."""
        for bucket in self._buckets:
            if not bucket.issued:
                self._issue(bucket)

    def _issue(self, bucket: Bucket) -> None:
        bucket.issued = True
        if missing := list(filter(zero3.is_released, bucket.params)):
            self._in_flight += self._scheduler.fetch(missing)
            self.plan.claim(param._zerosync_record for param in missing)

    # ---- around forwards, backwards and steps ----------------------------------------------------------------------

    def wait_for_all(self) -> None:
        """Nothing that is held is in flight any more: others than the modules' own hooks may use and reshard it."""
        in_flight, self._in_flight = self._in_flight, []
        for gather in in_flight:
            if not gather.is_done:
                gather.wait()

    def backward_begins(self) -> None:
        """A backward uses what the forwards of this window have used; it is there, whoever has resharded it since."""
        self.wait_for_all()
        held = [record.param for record in self.plan.held()]
        if zero3.all_gathered(held) or not any(zero3.is_released(p) and not zero3.is_persistent(p) for p in held):
            return
        records = [record for record in self.plan.held() if record in self._bucket_of]
        for place in sorted({self._bucket_of[record].place for record in records}):
            self._issue(self._buckets[place])
        self.wait_for_all()

    def before_read(self, param: Any) -> None:
        """A reader whom no hook serves finds what is held there, or on its way."""
        if self._steps:
            return  # at its end DeepSpeed gathers what is persistent, which is not to bring the rest of a bucket
        bucket = self._bucket_of.get(param._zerosync_record)
        if bucket is not None:
            if self.plan.holds_all:
                self._issue_all()
            self._issue(bucket)

    def stepping(self) -> AbstractContextManager[None]:
        """Around an optimizer step: of what it does not change, what is held stays."""
        return replaced(self, "_steps", True)

    def release_for_step(self) -> bool:
        """Reshard what an optimizer step that is under way changes; return whether that is all there is to reshard."""
        if not self._steps:
            return False
        stay = {record.param for record in self.plan.before_step()}
        self.wait_for_all()
        if not stay:
            return False
        with self.releasing_all():
            gathering.release_but(self._coordinator, self._engine.module, stay)
        return True

    def release_constants(self) -> None:
        """Reshard what steps have left: shards are about to be read or written."""
        records = self.plan.held(Claim.STEPS)
        self._release([record for record in records if not zero3.is_persistent(record.param)])
        for record in records:
            record.drop(Claim.STEPS)

    def _release(self, records: list[Record]) -> None:
        with self.releasing_all():
            for record in records:
                gathering.release_param(self._coordinator, record.param)
                record.drop(Claim.PHASE)
        self.plan.drop(records)

    # ---- what DeepSpeed's coordinator calls, for the other modules -------------------------------------------------

    @property
    def has_no_order(self) -> bool:
        """Whether DeepSpeed gathers for no module, and so need not compare over the ranks in which order they run."""
        return self._infers or (self.plan.holds_all and not gathering.in_flight(self._coordinator))

    def fetching(self, module: Any) -> None:
        for param in gathering.parameters_of(module) if self._has_empty else ():
            if zero3.is_released(param):
                gathering.gather_empty(param)
        if self.plan.counts:
            self.plan.count(gathering.parameters_of(module))

    def release(self, param: Any) -> bool:
        """Reshard ``param`` if nothing uses it, or hold it. Return whether DeepSpeed has nothing left to do.

        DeepSpeed itself reshards persistent ones wherever it does not know the order of modules.
        """
        record = param._zerosync_record
        if not self._releases_all and zero3.is_gathered(param):
            if record.hold or self._infers:
                self.plan.claim((record,))
                return True
            if zero3.is_persistent(param):
                return True
        return gathering.release(self._coordinator, param)

    @contextmanager
    def releasing_all(self) -> Iterator[None]:
        """Around the release of all parameters, of which none is held."""
        self.wait_for_all()
        with replaced(self, "_releases_all", True):
            yield


def _nothing(module: Any, *args: Any) -> None:
    """A hook that compilers may trace."""
