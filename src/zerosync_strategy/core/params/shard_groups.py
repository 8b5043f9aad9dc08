"""The process groups whose ranks shard ZeRO-3's parameters: as a program chooses them, and in the order of gathers.

A parameter that is sharded over a group belongs to that group. Another group that builds the same module has another
parameter of the same name, as with experts. Its gradient is that of the mean loss of all data-parallel ranks, as for
every parameter.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

from zerosync_strategy.core.comm.collectives import backend_for, is_native, new_group
from zerosync_strategy.core.comm.nodes import Nodes, Topology
from zerosync_strategy.core.comm.streams import Streams
from zerosync_strategy.core.engine import gathering, zero, zero3
from zerosync_strategy.core.engine.types import DeepSpeedEngine, Zero3Parameter
from zerosync_strategy.core.failures.agreement import GatherDigest

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class shard_over:  # named as a function, like torch.no_grad
    """Shard parameters over the ranks of one process group, instead of all ranks, under ZeRO stage 3.

    Either for modules that are built inside, also in Lightning's ``configure_model`` and under
    ``deepspeed.zero.Init``::

        with shard_over(group):
            self.experts = Experts()

    or for existing modules, before ``deepspeed.initialize``, ``Trainer.fit`` or ``accelerator.prepare``::

        shard_over(group, model.experts)

    The parameters belong to the group. They start from the values on the group's first rank, and each group trains and
    checkpoints its own. All ranks must build the same modules in the same order, each over a group that it is in.

    Args:
        process_group: a ``torch.distributed`` process group that contains this rank, or a one-dimensional
            ``DeviceMesh``, such as ``mesh["expert"]``.
        modules: modules whose parameters, including those of submodules, are sharded over it.

    Raises:
        TypeError: ``process_group`` or a module has another type.
        ValueError: this rank is not in the group, the mesh has several dimensions, or a module is sharded already.
    """

    def __init__(self, process_group: dist.ProcessGroup | DeviceMesh, *modules: torch.nn.Module) -> None:
        refuse_nested_init()
        self._group = _group_of(process_group)
        self._hook: RemovableHandle | None = None
        for module in modules:
            if not isinstance(module, torch.nn.Module):
                raise TypeError(f"shard_over() takes modules after the process group, got {type(module).__name__}.")
            for name, param in module.named_parameters():
                if zero3.is_sharded(param):
                    raise ValueError(
                        f"shard_over() found that parameter {name!r} of {type(module).__name__} is sharded already, by"
                        " deepspeed.zero.Init or an engine. Build the module inside 'with shard_over(group):'; under"
                        " zero.Init, and so in Lightning's configure_model, modules are sharded as they are built."
                    )
                self._mark(param)

    def __enter__(self) -> shard_over:
        self._hook = register_module_parameter_registration_hook(self._registered)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._hook is not None
        self._hook.remove()

    def _registered(self, module: torch.nn.Module, name: str, param: Zero3Parameter) -> None:
        if isinstance(param, torch.nn.Parameter) and not zero3.is_sharded(param):
            self._mark(param)

    def _mark(self, param: Any) -> None:
        zero3.shard_over(param, self._group)
        param.zerosync_sharded_over = self._group


def refuse_nested_init() -> None:
    """Make a ``zero.Init`` inside another one over other ranks raise a ``ValueError``, in this process.

    DeepSpeed ignores the inner one and leaves no trace of it on the parameters, so ``attach()`` could not detect it.
    """
    zero3.wrap_zero_init(_refuse_other_ranks)


def _refuse_other_ranks(inner: dist.ProcessGroup, outer: dist.ProcessGroup) -> None:
    ranks, around = map(dist.get_process_group_ranks, (inner, outer))
    if ranks != around:
        raise ValueError(
            f"zero.Init(data_parallel_group=...) over the ranks {ranks} was entered inside another"
            f" zero.Init, over {around} (Lightning's configure_model runs in one). DeepSpeed would ignore"
            " the inner one. Use 'with shard_over(group):' instead."
        )


def layout_problem(module: nn.Module, everyone: dist.ProcessGroup) -> str:
    """Return what is wrong with how ZeRO-3 shards ``module`` over ``everyone`` and its subgroups; empty if nothing."""
    ranks_by_group: dict[dist.ProcessGroup, list[int]] = {}
    for name, param in module.named_parameters():
        actual = zero3.process_group(param)
        groups = everyone, actual, getattr(param, "zerosync_sharded_over", actual)
        for group in groups:
            if group not in ranks_by_group:
                ranks_by_group[group] = dist.get_process_group_ranks(group)
        known, ranks, asked = (ranks_by_group[group] for group in groups)
        if asked != ranks:
            return (
                f"parameter {name!r} is sharded over the ranks {ranks}, where shard_over() has said"
                f" {asked}: DeepSpeed's expert and tensor parallelism choose the ranks themselves. Use one of"
                " the two."
            )
        if len(ranks) < len(known) and not zero3.has_own_group(param):
            return (
                f"parameter {name!r} is sharded over the ranks {ranks} of {known}, which shard_over() has"
                " not said: zero.Init(data_parallel_group=...) around a submodule shards all that is built elsewhere"
                " over that group too. Leave the group out of zero.Init, and build the submodule inside 'with"
                " shard_over(group):'."
            )
        if len(ranks) < len(known) and zero3.has_secondary_shard(param):
            return (
                f"parameter {name!r} is sharded over the ranks {ranks} of {known}, and"
                " 'zero_hpz_partition_size' asks for a second copy of it over others. DeepSpeed cannot do both. Leave"
                " 'zero_hpz_partition_size' out."
            )
    return ""


def _group_of(process_group: object) -> dist.ProcessGroup:
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(process_group, DeviceMesh):
        if process_group.ndim != 1:
            raise ValueError(
                f"shard_over() takes a DeviceMesh of one dimension, got {process_group.ndim}:"
                f" {process_group.mesh_dim_names}. Name one of them, as in mesh['expert']."
            )
        return process_group.get_group()
    if isinstance(process_group, dist.ProcessGroup):
        return process_group
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"shard_over() got a process group that rank {dist.get_rank()} is not in. Make all groups on every rank,"
            " and give each rank the one that it is in."
        )
    raise TypeError(
        f"shard_over() takes a torch.distributed process group or a DeviceMesh, got {type(process_group).__name__}."
    )


# ---- gathers ---------------------------------------------------------------------------------------------------------


MAX_STREAMS = 8
"""The most gather streams of one engine. A rank in more groups shares streams among them (U4)."""


@dataclass(eq=False)
class GatherGroup:
    """A process group whose ranks shard parameters.

    Attributes:
        communicator: the process group over which the ranks gather; ``process_group``, or one of the same ranks.
        index: its index in the order of gathers (U1).
        ranks: for errors.
        digest: of its gathers; ``None`` for a group of one rank, which gathers nothing.
        nodes: for gathers in two levels, within and between nodes; ``None``: in one level.
        is_nccl: torch's flight recorder records its gathers.
        in_place: the backend gathers parameters where they lie.
        stream: the stream on which it gathers (U4); ``None`` on a device without streams.
        is_tagged: gathers of different parameters do not match.
    """

    process_group: dist.ProcessGroup
    communicator: dist.ProcessGroup
    index: int
    ranks: str
    digest: GatherDigest | None
    nodes: Nodes | None
    is_nccl: bool
    in_place: bool
    stream: torch.Stream | None

    def __post_init__(self) -> None:
        self.is_tagged = self.digest is not None and self.digest.tagged

    def close(self) -> None:
        """Destroy what was made for the gathers."""
        if self.communicator is not self.process_group:
            with suppress(ValueError, AssertionError):  # the program has destroyed all process groups
                dist.destroy_process_group(self.communicator)


def gather_groups(
    engine: DeepSpeedEngine, topology: Topology, streams: Streams, separate: bool
) -> dict[dist.ProcessGroup, GatherGroup]:
    """Return the groups of the engine's parameters, by process group, in the order of gathers.

    ``separate``: on NCCL, each gathers over a communicator without reductions. Collective then.
    """
    by_all_reduce = gathering.config_of(engine).use_all_reduce_for_fetch_params  # sums each rank's shard and zeros
    # Two groups of the same ranks keep the order of their parameters.
    process_groups = dict.fromkeys(map(zero3.process_group, sorted(engine.module.parameters(), key=zero3.param_id)))
    count, overlaps = min(len(process_groups), MAX_STREAMS), gathering.config_of(engine).overlap_comm
    made = streams.make_gather_streams(count, overlaps)
    is_plain = zero.is_plain(zero.comm_backend())
    groups: dict[dist.ProcessGroup, GatherGroup] = {}
    for index, group in enumerate(sorted(process_groups, key=_order)):
        tagged = not (by_all_reduce or is_native(group, engine.device))
        digest = GatherDigest(group, tagged, engine.device, streams) if dist.get_world_size(group) > 1 else None
        nodes = topology.of(group) if digest is not None else None
        is_nccl = backend_for(group, engine.device.type) == "nccl"
        stream, members = made[index % len(made)], dist.get_process_group_ranks(group)
        makes = separate and is_nccl and digest is not None
        communicator = new_group(members, group, engine.device, is_first=True) if makes else group
        of_group = str(members), digest, nodes, is_nccl, is_plain and not tagged, stream
        groups[group] = GatherGroup(group, communicator, index, *of_group)
    return groups


def _order(process_group: dist.ProcessGroup) -> tuple[int, list[int], list[int]]:
    """Return the sort key of a group: larger groups first, and all rows of a mesh before or after all its columns."""
    ranks = dist.get_process_group_ranks(process_group)
    return -len(ranks), [rank - ranks[0] for rank in ranks], ranks
