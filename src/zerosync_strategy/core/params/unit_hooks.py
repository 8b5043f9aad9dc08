"""ZeRO-3: the hooks on units, which gather the parameters of each unit and reshard them.

=============================  =======================================================================================
when                           what happens to a unit
=============================  =======================================================================================
its forward begins             it is gathered, if it is sharded; the next units are gathered ahead
its forward ends               it is resharded, but not in a backward, which is about to reach the recomputed call
a backward reaches a call      when the backward reaches one of its outputs, or what hooks on saved tensors see first
                               (``engine/hooks.py``), it is gathered, and the next ahead; units whose calls began
                               after this call had ended are resharded: the backward has left them
the backward ends              the remaining units are resharded
=============================  =======================================================================================

A unit that is needed again within ``stage3_max_reuse_distance`` elements is not resharded: within a forward, within a
backward, from a forward to its backward, and from a forward without gradients, or a backward that no step follows, to
the next forward.

The backward hooks are on output tensors, so the graph has no additional nodes. Units stay unsharded until another
backward has ended if a backward with ``create_graph`` has reached them, if their outputs hide the tensors with which
their backward begins, if others may have left beside the outputs, or if their forward runs under a transform of
torch.func. Units stay unsharded until the step if they have returned their parameters, or views of them. A unit that is
held until the step waits for its chunks, once (``cache.py``).

The units gathered ahead are those that followed in earlier passes (``unit_order.py``), so they agree on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from zerosync_strategy.core.engine import compilation, gathering, zero3
from zerosync_strategy.core.engine.hooks import SavedTensorHooks, hookable, hooked, nodes_made
from zerosync_strategy.core.engine.parameter import MODULE, SHARDED, UNSHARDED, Record, settle
from zerosync_strategy.core.engine.torch_internals import internal
from zerosync_strategy.core.engine.transitions import claim_for_unit, drop, drop_for_unit
from zerosync_strategy.core.engine.types import DeepSpeedEngine, Zero3Parameter
from zerosync_strategy.core.params.cache import ParameterCache
from zerosync_strategy.core.params.issuing import arrived
from zerosync_strategy.core.params.scheduler import GatherScheduler
from zerosync_strategy.core.params.unit_order import END, INFINITE, Passes, Stay
from zerosync_strategy.core.params.units import FORWARD, GRAPH, REUSE, RUNNING, STEP, Unit

_PLAIN = (torch.Tensor, int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
"""Types in the output of a unit that cannot hide a tensor."""
_NONE: dict[Unit, int] = {}


class Call:
    """A forward of a unit.

    Attributes:
        number: it was the ``number``-th call to begin, of all units.
        ended: how many calls had begun at its end; ``None`` while it runs.
        reads: the parameters of other units that it has read, with their values (``values.py``).
        nodes: how many autograd nodes this thread had made before, if it gathers.
        hooks: on the tensors that autograd saves, until its end.
    """

    __slots__ = ("ended", "hooks", "nodes", "number", "reads", "unit")

    def __init__(self, unit: Unit, number: int) -> None:
        self.unit, self.number, self.nodes = unit, number, 0
        unit.running += 1
        if unit.running == 1:
            for attributes in unit.marks:
                attributes[RUNNING] = True
        self.ended: int | None = None
        self.reads: dict[Zero3Parameter, Any] = {}
        self.hooks: ExitStack | None = None

    def end(self, count: int) -> None:
        unit, self.ended = self.unit, count
        unit.running -= 1
        if not unit.running:
            unit.claims -= {FORWARD}
            for attributes in unit.marks:
                attributes[RUNNING] = False
        if self.hooks is not None:
            self.hooks.close()


class UnitHooks:
    """The hooks on the ``units`` of the module of ``engine``, until :meth:`remove`."""

    def __init__(
        self, engine: DeepSpeedEngine, units: list[Unit], scheduler: GatherScheduler, cache: ParameterCache
    ) -> None:
        self._root, self._units = engine.module, units
        self._scheduler, self._cache = scheduler, cache
        self._streams = scheduler.issuing.streams
        self._has_streams = bool(scheduler.issuing.gather_streams)
        config = gathering.config_of(engine)
        self._reuse_numel = config.max_reuse_distance
        limits = config.prefetch_bucket_size, config.max_live_parameters
        self._forwards, self._backwards = Passes(*limits), Passes(*limits)
        self._expected: dict[Unit, Stay] = {}  # units that no forward or backward uses now
        self._tasks: dict[int, dict[Unit, int]] = {}  # by backward: units, with the call reached; END: none yet
        self._calls: list[Call] = []  # the running ones
        self.saved_tensors = SavedTensorHooks(engine.module)
        self._count = 0  # calls that have begun, also in backwards
        self._opened, self._closes = 0, INFINITE  # backwards before this window; at its end, as expected
        self._handles: list[RemovableHandle] = []
        for method in (self._forward_begins, self._forward_ends, self._backward_comes, scheduler.backward_comes):
            compilation.keep_out_of_graphs(method)
        for unit in units:
            begins, ends = partial(self._forward_begins, unit), partial(self._forward_ends, unit)
            self._handles.append(unit.module.register_forward_pre_hook(begins, prepend=True))
            self._handles.append(unit.module.register_forward_hook(ends, always_call=True))

    def remove(self) -> None:
        self.recover()
        for handle in self._handles:
            handle.remove()
        for unit in self._units:
            for attributes in unit.marks:
                attributes.pop(RUNNING, None)
        self._handles = []

    def __deepcopy__(self, memo: object) -> UnitHooks:
        return self  # for a copied module, whose hooks do nothing

    @property
    def call(self) -> Call | None:
        return self._calls[-1] if self._calls else None

    # ---- forwards ------------------------------------------------------------------------------------------------

    def _forward_begins(self, unit: Unit, module: nn.Module, args: object) -> None:
        if module is not unit.module:
            return  # a copy, with parameters of its own
        if self._streams.has_graphs:
            self._streams.refuse_capture("A forward")
        is_recomputed = torch._C._current_graph_task_id() != -1
        is_outermost = not (self._calls or is_recomputed)  # the model, or a part that is called directly
        if is_outermost:
            for window in self._scheduler.issuing.windows:  # before this forward sends what it could match (W3)
                window.begun.compare_aborted()
            if self._tasks:  # left by backwards that have raised
                self._leave_tasks()
            if self.saved_tensors.is_used:
                self.saved_tensors.forward_begins()
        self._count += 1
        self._calls.append(call := Call(unit, self._count))
        if not (is_recomputed or self._cache.plan.holds_all):
            self._scheduler.order.begins(unit)
        if unit.held is not None or self._cache.infers:
            self._cache.before_forward(unit, self._calls[0].unit.module is self._root)
        elif unit.params:
            unit.claims |= {FORWARD}
            if is_outermost and self._forwards.begins_again(unit):
                self._over(self._forwards)
            self._fetch(unit, self._backwards if is_recomputed else self._forwards)
            call.nodes = nodes_made()
            if self.saved_tensors.is_used and not is_recomputed and torch.is_grad_enabled():
                call.hooks = hooked(partial(self._unpacks, call))

    def _forward_ends(self, unit: Unit, module: nn.Module, args: object, output: object) -> None:
        if not self._calls or self._calls[-1].unit is not unit:
            return  # an exception has ended its forward
        call, task = self._calls.pop(), torch._C._current_graph_task_id()
        call.end(self._count)
        if not (task != -1 or self._cache.plan.holds_all):
            self._scheduler.order.ends(unit)
        if unit.held is not None or self._cache.infers:
            self._cache.after_forward(unit)
            if not self._cache.plan.holds_all and torch.is_grad_enabled():
                for leaf in [output] if isinstance(output, torch.Tensor) else tree_leaves(output):
                    if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                        hookable(leaf).register_hook(partial(self._scheduler.backward_comes, unit))
        elif unit.params:
            has_graph = torch.is_grad_enabled()
            leaves = [output] if isinstance(output, torch.Tensor) else tree_leaves(output)
            expects = self._expect_uses(call, leaves, task, has_graph)
            if task == -1:
                again, end = self._forwards.distances(unit)
                if again < self._reuse_numel or (expects and 2 * end < self._reuse_numel):
                    self._expected[unit] = (self._backwards if expects else self._forwards).stay
                    unit.claims |= {REUSE}
                elif not has_graph and end + self._forwards.start(unit) < self._reuse_numel:
                    of = self._forwards
                    self._expected[unit] = Stay(of, of.count + 2)  # this one and the next
            self._leave_unused(unit)
        if module is self._root and not unit.running and task == -1:
            self._over(self._forwards)

    def _expect_uses(self, call: Call, leaves: list[object], task: int, has_graph: bool) -> bool:
        """Claim the unit for later uses of its values; ``leaves``: what its forward has returned.

        Return whether a backward may use them. Then :meth:`_backward_comes` is registered on the outputs.
        """
        unit, nodes, finds = call.unit, call.nodes, False
        suspects: list[torch.Tensor] = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                continue
            node, base = leaf.grad_fn, leaf._base
            if node is None or base is not None:  # what has been computed has memory of its own
                suspects += (leaf,)
            if has_graph and leaf.requires_grad:
                finds = True
                if node is None or torch._C._are_functorch_transforms_active():
                    unit.claims |= {GRAPH}  # a hook on a leaf would stay there
                    continue
                if (number := node._sequence_nr()) >= nodes:
                    nodes = number + 1
                (leaf if base is None else hookable(leaf)).register_hook(partial(self._backward_comes, call))
        if suspects and STEP not in unit.claims and unit.is_in(suspects):
            unit.claims |= {STEP}
        if not has_graph:
            return False
        if call.hooks is None and task == -1 and nodes < nodes_made():
            self.saved_tensors.need()  # what was made after the outputs may have left beside them
            unit.claims |= {GRAPH}
        if finds and task != -1 and task not in unit.claims:
            self._enter(task, unit, END)
        if (
            not finds
            and task not in unit.claims
            and _hides(leaves)
            and any(param.requires_grad for param in unit.params)
        ):
            unit.claims |= {GRAPH}
        return finds

    # ---- backwards -----------------------------------------------------------------------------------------------

    def _unpacks(self, call: Call) -> None:
        """Gather the unit of ``call`` if a backward needs what the call has saved before it comes to an output."""
        if call.ended is None or not in_backward():
            return
        if self._tasks.get(torch._C._current_graph_task_id(), _NONE).get(call.unit) != call.number:
            self.saved_tensors.need()
        self._backward_comes(call, None)

    def _backward_comes(self, call: Call, grad: object) -> None:
        """Gather the unit of ``call``, which a backward has reached."""
        unit, number, ended = call.unit, call.number, call.ended or 0
        task = torch._C._current_graph_task_id()
        entered = self._tasks.get(task, _NONE)
        if entered.get(unit) == number and zero3.least_status(unit.params) == UNSHARDED:
            return  # at another output of the same call
        self._scheduler.backward_comes(unit)
        for left in [each for each in entered if ended < entered[each] < END and each is not unit]:
            self._leave(task, left)
        for other in self._tasks:
            calls = self._tasks[other]
            if unit in calls and calls[unit] == END:
                del calls[unit]  # a backward inside of that one has reached the recomputed call
                unit.claims -= {other}
        self._enter(task, unit, number)
        if torch.is_grad_enabled():
            unit.claims |= {GRAPH}
        self._fetch(unit, self._backwards)

    def _enter(self, task: int, unit: Unit, number: int) -> None:
        if task not in self._tasks:
            if not self._tasks:  # the forwards of the model or of its parts are over
                self._over(self._forwards)
            self._tasks[task] = {}
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._backward_ends, task))
        self._tasks[task][unit] = number
        unit.claims |= {task}

    def _leave(self, task: int, unit: Unit) -> None:
        del self._tasks[task][unit]
        unit.claims -= {task}
        again, end = self._backwards.distances(unit)
        if again < self._reuse_numel:
            self._expected[unit] = self._backwards.stay
            unit.claims |= {REUSE}
        elif self._backwards.count + 1 < self._closes and end + self._forwards.start(unit) < self._reuse_numel:
            self._expected[unit] = self._forwards.stay
        self._leave_unused(unit)

    def _backward_ends(self, task: int) -> None:
        for unit in list(self._tasks.get(task, ())):
            self._leave(task, unit)
        self._tasks.pop(task, None)
        if not self._tasks:
            self._over(self._backwards)
            if not torch.is_grad_enabled():
                for unit in self._units:
                    if GRAPH in unit.claims:
                        unit.claims -= {GRAPH}
                        self._leave_unused(unit)

    # ---- gathering and resharding --------------------------------------------------------------------------------

    @internal
    def _fetch(self, unit: Unit, passes: Passes) -> None:
        """Unshard ``unit``, make the current stream wait for it, and gather the next units ahead."""
        passes.comes(unit)
        if unit in self._expected:
            del self._expected[unit]
            unit.claims -= {REUSE}
        if (status := zero3.least_status(unit.params)) != UNSHARDED:
            if status == SHARDED:
                if self._cache.plan.counts:
                    self._cache.plan.count(unit.params)
                self._scheduler.issue(unit.params)
            arrived(unit.records)
        if self._has_streams:
            self._scheduler.join(unit.records)
        claim_for_unit(unit.records)
        if passes.ahead:
            self._gather_ahead(passes)

    def _gather_ahead(self, passes: Passes) -> None:
        """Gather expected units ahead, within DeepSpeed's limits, unless half of the limit is unsharded already.

        The next unit has a message of its own, so that it waits for nothing else; the others share one.
        """
        missing: list[Unit] = []
        for following, is_half in passes.ahead:
            if following.held is not None:  # since that pass
                continue
            if zero3.least_status(following.params) == SHARDED:
                missing += (following,)
                self._expected[following] = passes.stay
            elif is_half and not missing:
                return
        if not missing:
            return
        alone = 1 if missing[0] is passes.ahead[0][0] else 0
        for units in (missing[:alone], missing[alone:]):
            if units:
                params = [param for unit in units for param in unit.params]
                if self._cache.plan.counts:
                    self._cache.plan.count(params)
                self._scheduler.issue(params)

    def _over(self, of: Passes) -> None:
        """End a forward of the model, or a backward, and reshard the units that were expected in it but not called."""
        of.over()
        for unit, stay in [*self._expected.items()]:
            if stay.passes.count >= stay.until:
                del self._expected[unit]
                unit.claims -= {REUSE}
                self._leave_unused(unit)

    def _leave_unused(self, unit: Unit) -> None:
        if unit.claims:
            return
        free = drop_for_unit(unit.records)
        if unit in self._expected:
            settle(free)  # at rest: readers treat it as sharded
        else:
            if self._has_streams:
                self._scheduler.join(free)  # on any stream
            self._cache.reshard(free)

    def _leave_tasks(self) -> None:
        for task, entered in list(self._tasks.items()):
            for unit in list(entered):
                self._leave(task, unit)
        self._tasks.clear()
        self._over(self._backwards)

    def end_uses(self) -> None:
        """End all uses of parameters by units and graphs: a step follows, perhaps inside a forward."""
        self._leave_tasks()
        self._over(self._forwards)
        left: dict[Record, None] = {}
        for unit in self._units:  # no calls
            unit.claims -= unit.claims
            for record in unit.records:
                if record.bits & MODULE or unit in self._expected:
                    left[record] = None
        self._expected = {}
        if left:
            drop(left, MODULE)
            if self._has_streams:
                self._scheduler.join(left)
            self._cache.reshard([*left])
        count = self._backwards.count
        if count > self._opened:
            self._opened, self._closes = count, 2 * count - self._opened

    def recover(self) -> None:
        """After an exception, end all running calls, too."""
        while self._calls:
            self._calls.pop().end(self._count)
        self.end_uses()


def in_backward() -> bool:
    """Return whether this thread is in a backward."""
    return torch._C._current_graph_task_id() != -1


def _hides(leaves: Iterable[object]) -> bool:
    """Return whether the output of a forward may refer to a tensor that is not among ``leaves``."""
    has_tensor = any(isinstance(leaf, torch.Tensor) for leaf in leaves)
    return not (has_tensor and all(isinstance(leaf, _PLAIN) for leaf in leaves))
