"""``attach()``: checks the engine, compares the ranks, and returns the handle."""

from __future__ import annotations

import atexit
import functools
import itertools
import sys
from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from zerosync_strategy.core.announcement import ATTACHED, note, say
from zerosync_strategy.core.attached.engine import AttachedEngine
from zerosync_strategy.core.attached.overrides import (
    EngineOverrides,
    OptimizerOverrides,
    Stage3EngineOverrides,
    Stage3Overrides,
    Stage12Overrides,
    SwitchOverrides,
    WholeStage3Overrides,
    WholeStage12Overrides,
    ZeroSwitchOverrides,
)
from zerosync_strategy.core.engine import patches, zero, zero3, zero12
from zerosync_strategy.core.engine.types import DeepSpeedEngine
from zerosync_strategy.core.engine.zero import require_supported
from zerosync_strategy.core.environment import say_problems
from zerosync_strategy.core.failures.agreement import model_facts, require_same
from zerosync_strategy.core.failures.rank_status import rank_status
from zerosync_strategy.core.handle import ZeroSync
from zerosync_strategy.core.optimizer.probe import switches_weights
from zerosync_strategy.core.optimizer.problems import (
    dtype_problem,
    embedding_problem,
    foreign_problem,
    kind_of,
    mark_used,
    shared_memory_problem,
    take_out_dropped_groups,
)
from zerosync_strategy.core.options import BLOCK, ZeroSyncConfig
from zerosync_strategy.core.params.shard_groups import layout_problem
from zerosync_strategy.core.report import count_text
from zerosync_strategy.version import __version__

# Blocks of the DeepSpeed configuration on which the collectives depend.
_ALIKE = ("zero_optimization", "gradient_clipping", "bf16", "fp16", "communication_data_type", "data_types")


def attach(engine: DeepSpeedEngine, config: ZeroSyncConfig | None = None, **options: object) -> ZeroSync:
    """Give a live DeepSpeed engine one gradient reduction per optimizer step.

    From now on any number of ``engine.backward(loss)`` or ``loss.backward()`` before ``engine.step()`` is one window:
    gradients stay local, and the step reduces them once.

    Args:
        engine: what ``deepspeed.initialize`` returned, with ZeRO stage 1, 2 or 3 and an optimizer.
        config: the options. A ``"zerosync"`` block in the engine's DeepSpeed configuration must not differ from them,
            and is the default.
        **options: single options by name instead of ``config``, merged with the block.

    Returns:
        The handle: reports, abort, detach.

    Raises:
        TypeError, ValueError: ZeroSync does not support the engine or an option, or models or options differ between
            ranks.
        ContractError: DeepSpeed's internals are not the ones that ZeroSync knows (C1).
    """
    replaces = isinstance(engine, EngineOverrides)
    if replaces and not engine._zerosync.may_be_replaced:
        raise ValueError("attach() found this engine attached already. Use its handle, or detach() first.")
    if not replaces:
        require_supported(engine)
    block = zero.user_config(engine).get(BLOCK)
    if config is None:
        config = ZeroSyncConfig.resolve(block, options)
    elif options:
        raise ValueError(f"attach() takes either config= or single options, got both: {', '.join(options)}.")
    elif not isinstance(config, ZeroSyncConfig):
        raise TypeError(
            f"attach() takes config=ZeroSyncConfig(...), got {config!r}. Or give single options by name, as in"
            " attach(engine, coalesce=False)."
        )
    else:
        config.check_block(block)
    if replaces:
        engine._zerosync.detach()
    optimizer = zero.stepping_optimizer(engine)
    kind = kind_of(optimizer, config.elementwise_optimizer)
    if problem := kind.problem or _parameters_problem(engine) or take_out_dropped_groups(optimizer):
        raise ValueError(f"attach() found that {problem}")
    say_problems(engine, config)  # first, because a limit of files may end what follows
    with rank_status().activity("attach()", lambda: "before the first optimizer step"):
        everyone = zero.data_parallel_group(engine.optimizer)
        problem = layout_problem(engine.module, everyone) if zero.stage(engine) == 3 else ""
        require_same("attach()", {"sharding": problem or "as asked"} | _facts(engine, config), everyone)
        if problem:
            raise ValueError(f"attach() found that {problem}")
    let_modules_zero()
    mark_used(optimizer)
    try:
        zerosync = ZeroSync(_attached(engine, config, kind.needs_whole))
    except BaseException:
        patches.remove_user(engine)
        raise
    watch_end()
    _announce(zerosync)
    return zerosync


def _attached(engine: DeepSpeedEngine, config: ZeroSyncConfig, whole: bool) -> AttachedEngine:
    """Make the attached engine for the ZeRO stage of ``engine``, override DeepSpeed's methods, and return it."""
    overrides: type[OptimizerOverrides]
    of_engine = EngineOverrides
    if zero.stage(engine) == 3:
        of_engine = Stage3EngineOverrides
        overrides = WholeStage3Overrides if whole else Stage3Overrides
    else:
        overrides = WholeStage12Overrides if whole else Stage12Overrides
    attached = AttachedEngine(engine, config, whole)
    layer: type = overrides
    switching = []
    if switches_weights(stepping := zero.stepping_optimizer(engine)):
        layer = type(overrides.__name__, (ZeroSwitchOverrides, overrides), {})
        switching = [(stepping, SwitchOverrides)]
    attached.begin((engine, of_engine), (engine.optimizer, layer), *switching)
    return attached


def _announce(zerosync: ZeroSync) -> None:
    stage, ranks = zero.stage(zerosync.engine), dist.get_world_size(zero.data_parallel_group(zerosync.engine.optimizer))
    what = f"{ATTACHED} {type(zerosync.engine.module).__name__}, ZeRO-{stage} on {count_text(ranks, 'rank')}"
    note(what)
    if dist.get_rank() == 0:
        say(f"{__version__} {what}: {zerosync._attached.summary()}")


def _parameters_problem(engine: DeepSpeedEngine) -> str:
    """Return a problem of the engine's parameters that ``deepspeed.initialize`` does not report; empty if none."""
    trained = [] if zero.stage(engine) == 3 else [group.params for group in zero12.flat_groups(engine.optimizer)]
    module = engine.module
    problem = dtype_problem(module) or embedding_problem(module) or shared_memory_problem(module)
    return problem or foreign_problem(module, trained)


def _facts(engine: DeepSpeedEngine, config: ZeroSyncConfig) -> dict[str, str]:
    """Return the facts on which the collectives of a rank depend."""
    configured = zero.user_config(engine)
    facts = {f"DeepSpeed's {name!r}": repr(configured.get(name)) for name in _ALIKE}
    for name in config.option_names():
        value = getattr(config, name)
        facts[f"ZeroSync's {name!r}"] = getattr(value, "__qualname__", "") or repr(value)
    if zero.stage(engine) == 3:  # gathers are in the order of these numbers
        facts["ZeRO-3's numbers of the parameters, by the order in which they were built"] = _numbering(engine)
    return facts | model_facts(engine.module)


def _numbering(engine: DeepSpeedEngine) -> str:
    """Return the ids of the parameters of ``engine``, in the order of its module, as ranges."""
    ids = [zero3.param_id(param) for param in engine.module.parameters()]
    breaks = [0, *(place for place in range(1, len(ids)) if ids[place] != ids[place - 1] + 1), len(ids)]
    return ", ".join(f"{ids[first]} to {ids[end - 1]}" for first, end in itertools.pairwise(breaks) if first < end)


def let_modules_zero() -> None:
    """Make ``zero_grad()`` of any module reach the engines that train its parameters."""
    patches.replace(patches.ZERO_GRAD, _zero_grad)


def _zero_grad(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def zero_grad(module: nn.Module, *args: object, **kwargs: object) -> None:
        for attached in list(AttachedEngine.all):
            attached.parts.window.changes.show_all()
        with zero3.as_it_is():
            stock(module, *args, **kwargs)
        params = set(map(id, module.parameters()))
        for attached in list(AttachedEngine.all):
            attached.module_zeroed(params)

    return zero_grad


@functools.cache
def watch_end() -> None:
    """Check at the end of this process that an optimizer step was made. Registered once."""
    atexit.register(_check)


def _check() -> None:
    if getattr(sys, "last_type", None) is not None:  # an uncaught exception ends the process
        return
    if not dist.is_initialized() or dist.get_rank() != 0:
        return
    for attached in AttachedEngine.all:
        made, name = attached.parts.window.unused, type(attached.parts.engine.module).__name__
        if attached.meter.steps == 0 and made > 1:  # a single backward may be intended
            say(
                f"{made} backwards were made of {name}, and no optimizer step: nothing was trained. Call engine.step(),"
                " or optimizer.step() under a framework; under Accelerate, a program that relies on the step in"
                " accelerator.backward() needs the option step_on='backward'."
            )
