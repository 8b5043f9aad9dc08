"""The calls of Lightning, Fabric and Accelerate into core. They set up a training in this order:

1. a strategy or plugin is made: its contract is verified, its options are read (:class:`StrategyArguments`), and the
   process is prepared (:func:`prepare_process`);
2. the device is known, before the process group is made: :func:`prepare_device`;
3. the program builds its model inside :func:`building_model`;
4. :func:`set_up` checks the model and its optimizer on all ranks, has the framework build the engine, and attaches; an
   engine for evaluation is built inside :func:`building_engine`, and its parameters are given to
   :func:`gather_for_evaluation`;
5. the training ends: ``abort()`` or ``end()`` of the handles, and :func:`report_failure` of an exception.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from zerosync_strategy.arguments import StrategyArguments
from zerosync_strategy.core.attached.checkpointing import saved_checkpoint
from zerosync_strategy.core.attached.contents import weights_and_client_state
from zerosync_strategy.core.attaching import attach
from zerosync_strategy.core.checkpoints.background import after_save, wait_for_save
from zerosync_strategy.core.checkpoints.loads import SavedCheckpoint, one_load
from zerosync_strategy.core.checkpoints.manifests import is_distributed
from zerosync_strategy.core.checkpoints.saves import one_save
from zerosync_strategy.core.comm.collectives import largest
from zerosync_strategy.core.engine import compat, patches, zero
from zerosync_strategy.core.engine.compat import allow_any_model
from zerosync_strategy.core.engine.engine_state import (
    FrozenStay,
    frozen_missing,
    loading_without_optimizer,
)
from zerosync_strategy.core.engine.hooks import drop_functions, leave_sharded
from zerosync_strategy.core.engine.param_functions import gather_at_once as gather_for_evaluation
from zerosync_strategy.core.engine.patches import ModeOverrides, Stock, interpose, replaced, restore
from zerosync_strategy.core.engine.several import parameter_tree, requiring_grad, restrict, show_parameters
from zerosync_strategy.core.engine.transformers import tell_transformers
from zerosync_strategy.core.engine.types import DeepSpeedEngine
from zerosync_strategy.core.engine.zero import accumulate_outside, offloads_optimizer
from zerosync_strategy.core.engine.zero3 import as_it_is, full_shape, has_own_group, in_full_shapes
from zerosync_strategy.core.engine.zero3_optimizer import reload_master_weights
from zerosync_strategy.core.failures.agreement import model_facts, require_same
from zerosync_strategy.core.failures.errors import RankError, is_communication_error
from zerosync_strategy.core.failures.rank_state import Doing
from zerosync_strategy.core.failures.rank_status import rank_status
from zerosync_strategy.core.handle import ZeroSync
from zerosync_strategy.core.optimizer.problems import (
    drop_empty_groups,
    dtype_problem,
    optimizer_problem,
)
from zerosync_strategy.core.options import ZeroSyncConfig, refuse_removed
from zerosync_strategy.core.params.module_parameters import copy_problem, readable
from zerosync_strategy.core.params.shard_groups import refuse_nested_init
from zerosync_strategy.core.params.state_entries import in_full
from zerosync_strategy.core.report import StepReport

__all__ = [  # what frontends use in addition to the functions below
    "DeepSpeedEngine", "Doing", "FrozenStay", "ModeOverrides", "SavedCheckpoint", "StepReport", "Stock",
    "StrategyArguments", "ZeroSync", "accumulate_outside", "after_save", "as_it_is", "copy_problem", "dtype_problem",
    "full_shape", "gather_for_evaluation", "has_own_group", "in_full", "in_full_shapes", "interpose", "is_distributed",
    "leave_sharded", "loading_without_optimizer", "offloads_optimizer", "one_load", "one_save", "optimizer_problem",
    "parameter_tree", "readable", "refuse_removed", "reload_master_weights", "requiring_grad", "restore", "restrict",
    "wait_for_save", "weights_and_client_state",
]  # fmt: skip


def prepare_process(user: object = None, nested_init: bool = True) -> None:
    """Install the replacements that this process needs before an engine is made (C2).

    They stay while ``user`` or an attached engine lives, or until ``patches.remove_user(user)``. ``nested_init``: allow
    a ``zero.Init`` inside another one.
    """
    if user is not None:
        patches.add_user(user)
    allow_any_model()
    if not nested_init:
        refuse_nested_init()


def keep_local_gradients(zerosyncs: Sequence[ZeroSync], wanted: bool) -> None:
    """Take no backward for the last without a promise, if local gradients are ``wanted`` on some rank. Collective."""
    if largest([int(wanted)], None)[0]:
        for zerosync in zerosyncs:
            zerosync.window.last.expect_none()


def prepare_device(device_type: str, precision: object = None) -> str:
    """Prepare DeepSpeed for devices of this type, before the process group is made.

    Return why it cannot train on them with this ``precision`` of Lightning's; empty if it can.
    """
    if device_type != "cpu":
        return ""
    if precision in ("16-true", "16-mixed"):
        return (
            f"DeepSpeed does not train with precision={precision!r} on CPU. Use '32-true', 'bf16-mixed' or 'bf16-true',"
            " or a GPU."
        )
    compat.prepare_cpu()
    return ""


def share_process_group() -> None:
    """Make DeepSpeed use a process group that the program or its framework has made without it, if there is one."""
    compat.take_process_group()


@contextmanager
def building_model(sharding: AbstractContextManager[None], config: object, stage: int) -> Iterator[None]:
    """Around the building of a model, which ZeRO-3 shards meanwhile.

    ``sharding`` is the framework's own context, which enters ``zero.Init`` and may complete the DeepSpeed configuration
    ``config``.
    """
    prepare_process(nested_init=False)
    with sharding:
        config_of_transformers = tell_transformers(config) if stage == 3 else None
        yield
    del config_of_transformers  # transformers shards what it builds while this lives, to which it has a weak reference


@contextmanager
def building_engine(strategy: Any = None) -> Iterator[None]:
    """Around the building of an engine, for one of Lightning's ``strategy`` or for another framework.

    Lightning gives DeepSpeed the index of the root device as the local rank; on the CPU, devices get an index here.
    """
    indexed: AbstractContextManager[None] = nullcontext()
    if strategy is not None and (devices := strategy.parallel_devices) and devices[0].type == "cpu":
        numbered = [torch.device("cpu", index) for index in range(len(devices))]
        indexed = replaced(strategy, "parallel_devices", numbered)
    with indexed, zero.building_engine():
        yield


def set_up(
    call: str, module: torch.nn.Module, config: ZeroSyncConfig, build: Callable[[], DeepSpeedEngine | None], *,
    optimizers: Sequence[Optimizer] = (), shown: Optimizer | None = None, problem: str = "",
    facts: Mapping[str, str] | None = None, losses_divided_by: Callable[[], float] | None = None,
) -> ZeroSync | None:  # fmt: skip
    """Build an engine of ``module`` and attach to it. Collective.

    Every rank raises a ``ValueError`` if the model or an optimizer cannot be trained, or if they differ between ranks.

    Args:
        call: of the program, for errors.
        build: builds and returns the engine in the framework's own way; ``None``: no engine is needed for training.
        optimizers: to check.
        shown: the optimizer whose parameters the ``param_groups`` of the engine's optimizer show.
        problem: why the engine cannot be built, as the frontend has found; empty if it can.
        facts: what must be the same on all ranks, in addition to the model.
        losses_divided_by: see :class:`ZeroSync`.
    """
    problems = (optimizer_problem(module, optimizer, config.elementwise_optimizer) for optimizer in optimizers)
    problem = next(filter(None, problems), problem)
    require_same(call, {"optimizer": problem or "as asked"} | dict(facts or {}) | model_facts(module))
    if problem:
        raise ValueError(f"{call} found that {problem}")
    for optimizer in optimizers:
        drop_empty_groups(optimizer)
    groups = [] if shown is None else [list(group["params"]) for group in shown.param_groups if group["params"]]
    drop_functions(module)  # those of an earlier engine that has evaluated or trained the module
    with building_engine():
        engine = build()
    if engine is None:
        return None
    if shown is not None:
        show_parameters(engine.optimizer, groups)
    try:
        zerosync = attach(engine, config)
    except BaseException:
        leave_sharded(engine)  # its hooks would take part in what another engine trains
        raise
    if losses_divided_by is not None:
        zerosync.losses_divided_by = losses_divided_by
    return zerosync


def handle_of(value: object) -> ZeroSync | None:
    """Return the handle of an attached engine, or of its optimizer; ``None`` for anything else."""
    found = getattr(value, "_zerosync", None)
    return found if isinstance(found, ZeroSync) else None


def activity(what: object) -> AbstractContextManager[None]:
    """Around what a frontend does that may communicate (W4)."""
    return rank_status().activity(what)


def report_failure(error: BaseException) -> None:
    """Report an exception that ends the training to the other ranks; for a communication error, warn what they did."""
    if not dist.is_initialized() or isinstance(error, RankError):
        return
    if is_communication_error(error):
        warnings.warn(rank_status().describe("the training", error), stacklevel=3)
    else:
        rank_status().record_failure(f"{type(error).__name__}: {error}", error)


def checkpoint_of(
    zerosync: ZeroSync, directory: str | Path, tag: str | None, optimizer_states: bool
) -> SavedCheckpoint:
    """Return the checkpoint that the engine's ``load_checkpoint`` reads with these arguments, to verify it before."""
    return saved_checkpoint(zerosync._attached, directory, tag, optimizer_states)


def whole_checkpoint(module: torch.nn.Module, zerosyncs: Sequence[ZeroSync]) -> AbstractContextManager[None]:
    """Around a save or load by the first of ``zerosyncs``, so that it includes parameters that no engine trains.

    ZeRO-3 saves and loads a parameter that is in no optimizer only if it is frozen.
    """
    if zero.stage(zerosyncs[0].engine) == 3:
        for zerosync in zerosyncs[1:]:
            of_stage_3: Any = zerosync._attached.stage
            of_stage_3.release()  # DeepSpeed makes the first one do so
    trained = {param for zerosync in zerosyncs for param in zerosync.parameters}
    return requiring_grad([param for param in module.parameters() if param not in trained], False)


def load_full(module: torch.nn.Module, state: Mapping[str, object], strict: bool, frozen_stay: bool = False) -> None:
    """Call ``load_state_dict(state)`` of a module that no engine trains, sharded or not. Collective.

    ``frozen_stay``: frozen parameters that ``state`` lacks keep their values.
    """
    from deepspeed import zero as deepspeed_zero

    with deepspeed_zero.GatheredParameters(list(module.parameters()), modifier_rank=0):
        kept = frozen_missing(module, state) if frozen_stay else {}
        module.load_state_dict({**state, **kept}, strict=strict)


@contextmanager
def one_more(options: object, limit: str) -> Iterator[None]:
    """While active, ``options`` keep one checkpoint more than the option ``limit``, if that limits them.

    The newest is written in the background, and the one before it is the last complete one.
    """
    asked = getattr(options, limit)
    with replaced(options, limit, asked and asked + 1):
        yield
