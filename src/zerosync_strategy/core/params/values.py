"""ZeRO-3: the values of a parameter at rest, for the reads and writes that ``intercepted.py`` finds (N1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from zerosync_strategy.core.comm.collectives import largest
from zerosync_strategy.core.engine import param_functions, zero3
from zerosync_strategy.core.engine.parameter import Record, is_in_use, record_of
from zerosync_strategy.core.engine.torch_internals import outside_of_transforms
from zerosync_strategy.core.engine.types import Zero3Parameter
from zerosync_strategy.core.failures.errors import HANDLE
from zerosync_strategy.core.params.scheduler import GatherScheduler
from zerosync_strategy.core.params.unit_hooks import UnitHooks, in_backward

REMEDY = f"Do it inside 'with zerosync.full_parameters():'. ({HANDLE}.)"
WATCHED_STEPS = 3  # first steps, in which all parameters are watched for module writes through .data
# By address of a placeholder's memory:
_by_address: dict[int, tuple[ParameterValues, Zero3Parameter]] = {}


class ParameterValues:
    """Gives the parameters of a ZeRO-3 engine their values while they are at rest.

    ``scheduler`` gathers a parameter into memory of its own; a unit's forward that reads it again soon reuses that.
    ``class_at_rest`` maps a parameter's class to its class at rest. Without ``gathers``, each operation on a parameter
    at rest is an error.
    """

    def __init__(
        self, scheduler: GatherScheduler, hooks: UnitHooks, class_at_rest: Callable[[type], type], gathers: bool
    ) -> None:  # fmt: skip
        self.scheduler, self._hooks, self._gathers = scheduler, hooks, gathers
        self._expected: set[Record] = set()  # may get gradients while sharded
        self._handles: list[RemovableHandle] = []
        self._steps = 0
        self._in_shards: Iterable[Record] = ()
        self._records = scheduler.records
        for record in self._records:
            param_functions.intercept(record.param)
            record.intercept(self, class_at_rest(record.own_class))

    def detach(self) -> None:
        self.leave()
        for handle in self._handles:
            handle.remove()
        for record in self.scheduler.records:
            for placeholder in record.placeholders.values():
                del _by_address[placeholder.data_ptr()]
            record.placeholders = {}

    def leave(self) -> None:
        """Give all parameters their own classes and functions back."""
        for record in self._records:
            record.leave()
            param_functions.restore(record.param)
        self._records = []

    def begin_step(self, records: Iterable[Record]) -> None:
        """Note, until :meth:`written`, that the shards of ``records`` have what was written to gathered values."""
        self._in_shards = records
        for record in self._in_shards:
            record.in_shards = True

    def written(self, by_step: bool) -> None:
        self._steps += by_step
        if self._hooks.saved_tensors.is_used:
            self._hooks.saved_tensors.stepped(self._steps)
        for record in self._in_shards:
            record.in_shards = False
        self._in_shards = ()
        if by_step and self._steps == WATCHED_STEPS:
            self._ask_device()
            if self.scheduler.copies:
                self._share_findings()
            for record in self._records:
                record.watched = record.writes_found > 0

    def _share_findings(self) -> None:
        """Share what each rank has found in its shard, because a copy has the values of all shards. Collective."""
        for process_group, group in self.scheduler.groups.items():
            of_group = [record for record in self._records if record.group is group]
            found = largest([record.writes_found for record in of_group], process_group)
            for record, of_any in zip(of_group, found, strict=True):
                record.writes_found = of_any

    def resharding(self, record: Record) -> None:
        """Carry writes to the gathered values over to the shards, unless the shards are newer."""
        if record.in_shards:
            record.forget_changes()
        elif record.stays:
            record.forget_changes()
            record.write()
            _write_shard(record.param)
        else:
            changed = record.changed()
            if isinstance(changed, torch.Tensor):
                _write_shard(record.param)
                self.scheduler.values_in_shards(record.param)
                stream = self.scheduler.streams.caller
                record.flags[stream] = record.flags[stream] | changed if stream in record.flags else changed
            elif changed:
                self._check_alike(record.param, record.param)
                self.write_back(record.param, record.param.data)
                record.writes_found += 1

    def _ask_device(self) -> None:
        """Read the flags of writes to parameters from the device, for which the host waits (S3)."""
        flags = [(record, *of_stream) for record in self._records for of_stream in record.flags.items()]
        if not flags:
            return
        self.scheduler.streams.caller_waits_for({stream for _, stream, _ in flags})
        for (record, _, _), changed in zip(flags, torch.stack([flag for *_, flag in flags]).tolist(), strict=True):
            record.flags = {}
            record.writes_found += changed

    def generation(self, param: Zero3Parameter) -> int:
        """Return a number that grows whenever the values of ``param`` may have changed."""
        record = record_of(param)
        if record.flags:
            self._ask_device()
        return record.writes + record.writes_found

    @property
    def is_asked(self) -> bool:
        """Whether a forward or a backward is running, which may read."""
        return self._hooks.call is not None or in_backward()

    def read(self, param: Zero3Parameter) -> GatheredValues:
        """Return the values of ``param``: its own memory if it is in use, else gathered values. Collective."""
        with outside_of_transforms():
            return self._read(param)

    def _read(self, param: Zero3Parameter) -> GatheredValues:
        call = self._hooks.call
        # Activation checkpointing may stop a recomputed forward early, without a call of the hook at its end.
        reads: dict[Zero3Parameter, GatheredValues] = {} if call is None or in_backward() else call.reads
        found = reads.get(param)
        if found is None or found.generation != self.generation(param):
            self.scheduler.arrive(param)
            record = record_of(param)
            record.settle()
            # Without copies for readers, a parameter that a context has gathered is read in place.
            is_claimed = not self._gathers and zero3.is_gathered(param) and record.claims
            if record.values is not None and (is_claimed or is_in_use(param)):
                with zero3.as_it_is():
                    return GatheredValues(self, param, param.data, in_place=True)
            if not self._gathers:
                raise RuntimeError(
                    f"Parameter {record.name} was read or written while ZeRO-3 had it sharded, which"
                    f" 'eager_frames': false does not let it be. {REMEDY}"
                )
            with torch.inference_mode(False), torch.no_grad(), zero3.as_it_is():
                stays = zero3.is_gathered(param) and not record.is_in_storage  # its bytes may be freed
                full = param.data if stays else self.scheduler.unshard(param)
            # No view, because a program may write to what has gradients.
            found = reads[param] = GatheredValues(self, param, full.data)
            while sum(map(zero3.full_numel, reads)) > self.scheduler.prefetched_numel:
                del reads[next(iter(reads))]
        return found

    def assign(self, param: Zero3Parameter, value: torch.Tensor) -> None:
        """Do what ``param.data = value`` means; raise ``ValueError`` if shape, dtype or device differ."""
        self._check_alike(param, value)
        self.write_back(param, value.detach())

    def _check_alike(self, param: Zero3Parameter, value: torch.Tensor) -> None:
        expected, found = (
            f"{shape} of {of.dtype} on {of.device}"
            for shape, of in ((zero3.full_shape(param), param), (tuple(value.shape), value))
        )
        if expected != found:
            raise ValueError(
                f"Parameter {record_of(param).name}, sharded by ZeRO-3, was given new data: {found}, where it is"
                f" {expected}. ZeRO can change neither. Convert the module before the engine is built, or build it"
                " anew."
            )

    def write_back(self, param: Zero3Parameter, full: torch.Tensor) -> None:
        """Set the values of ``param`` to ``full``: each rank writes its own shard, and the gathered values, if any.

        Raise ``RuntimeError`` if this rank's shard is not in memory, is quantized, or exists twice.
        """
        if zero3.full_numel(param) == 0:
            return
        with torch.no_grad(), zero3.as_it_is():
            is_there = zero3.own_shard(param).numel() > 0
            if not is_there or zero3.is_quantized(param) or zero3.has_secondary_shard(param):
                raise RuntimeError(
                    f"Parameter {record_of(param).name} was written to while ZeRO-3 had its shard on disk, quantized or"
                    f" twice (NVMe offload, quantized weights, hpZ). {REMEDY}"
                )
            record_of(param).write()
            if (pair := zero3.shard_pair(param, full)) is not None:
                shard, part = pair
                shard.copy_(part)
            if zero3.is_gathered(param) and param.data_ptr() != full.data_ptr():
                param.data.copy_(full)

    # ---- gradients -----------------------------------------------------------------------------------------------

    def differentiable(self, param: Zero3Parameter, full: torch.Tensor) -> torch.Tensor:
        """Return the values ``full`` of ``param`` as a tensor whose gradient goes to it."""
        self.expect_gradient(param)
        # Gradients add up where graphs meet: for other traces at the placeholder, under ZeRO-3 at the parameter.
        with outside_of_transforms():
            return _GradientToParameter.apply(param, full)  # type: ignore[no-untyped-call]

    def placeholder(self, param: Zero3Parameter) -> torch.Tensor:
        """Return the tensor for ``param`` in graphs: in its shape, without memory, and always the same one.

        Its gradient is added to the parameter's own.
        """
        placeholders, trains = record_of(param).placeholders, param.requires_grad
        if trains not in placeholders:
            blank = torch.empty((), dtype=param.dtype, device=param.device).expand(zero3.full_shape(param))
            placeholder: torch.Tensor = blank
            if trains:  # autograd makes the parameter's node, which accepts gradients of the shape that it sees now
                with zero3.as_it_is(), zero3.in_full_shapes((param,)), torch.enable_grad():
                    placeholder = _GradientToParameter.apply(param, blank)  # type: ignore[no-untyped-call]
                placeholder.grad_fn._set_sequence_nr(2**63 - 1)  # type: ignore[union-attr]  # once it has its gradients
            torch._dynamo.mark_static(placeholder)
            placeholders[trains] = placeholder
            _by_address[placeholder.data_ptr()] = (self, param)
        return placeholders[trains]

    def expect_gradient(self, param: Any) -> None:
        """Prepare for a gradient of ``param`` while it is sharded: autograd then requires it to have its full shape."""
        if record_of(param) in self._expected or not param.requires_grad or not zero3.full_numel(param):
            return
        self._expected.add(record_of(param))
        placeholder = self.placeholder(param)

        def in_shape(_: object) -> None:
            with zero3.as_it_is():
                if param.numel() == 0:
                    param.data = placeholder.detach()

        def as_it_was(_: object) -> None:
            with zero3.as_it_is():
                if zero3.is_released(param) and param.numel() > 0:
                    param.data = placeholder.new_empty(0)

        node = placeholder.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        self._handles += (
            node.register_prehook(in_shape),  # type: ignore[union-attr]
            param.register_post_accumulate_grad_hook(as_it_was),
        )


def _write_shard(param: Zero3Parameter) -> None:
    """Copy this rank's part of the gathered values to its shard; the host does not wait."""
    if (pair := zero3.shard_pair(param)) is not None:
        shard, part = pair
        shard.copy_(part, non_blocking=True)


class _GradientToParameter(torch.autograd.Function):
    """A stand-in for a parameter; its gradient goes to the parameter's own node and adds to those of other uses."""

    @staticmethod
    def forward(ctx: Any, param: Zero3Parameter, instead: torch.Tensor) -> torch.Tensor:
        ctx.param = param
        return instead.view_as(instead)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return grad if ctx.param.requires_grad else None, None


def of_placeholder(placeholder: torch.Tensor) -> tuple[ParameterValues, Zero3Parameter]:
    """Return the :class:`ParameterValues` and the parameter for which ``placeholder`` stands."""
    return _by_address[placeholder.data_ptr()]


class GatheredValues:
    """Values of a parameter, in memory that stays as long as something refers to it.

    Attributes:
        full: the values, in the parameter's shape.
        in_place: this is the parameter's own memory, which it keeps for its readers' backward.
        generation: of these values; see :meth:`ParameterValues.generation`.
    """

    def __init__(
        self, values: ParameterValues, param: Zero3Parameter, full: torch.Tensor, in_place: bool = False
    ) -> None:
        self._values, self.param, self.full, self.in_place = values, param, full, in_place
        self.generation = values.generation(param)

    def check(self) -> None:
        """Raise if the parameter has other values now."""
        if self.generation != self._values.generation(self.param):
            raise RuntimeError(
                f"A view of parameter {record_of(self.param).name}, sharded by ZeRO-3, was used after the parameter"
                f" had changed, and does not show it. Take the view anew. Or: {REMEDY}"
            )

    def for_use(self) -> torch.Tensor:
        """Return the values as autograd has to see the parameter now."""
        if self.param.requires_grad and torch.is_grad_enabled() and self.full.numel():
            if self.in_place:
                return self.param
            return self._values.differentiable(self.param, self.full)
        return self.full

    def write_back(self) -> None:
        """Write the values, which an operation has changed, to the parameter."""
        self.full = self.full.data  # without a graph, if what was written has one
        self._values.write_back(self.param, self.full)
        self.generation = self._values.generation(self.param)
