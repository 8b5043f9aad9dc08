"""The ZeRO-3 parameters of one module: what gathers, holds and reads them, and full parameters in place (N1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn
from torch.optim.swa_utils import AveragedModel

from zerosync_strategy.core.comm.nodes import MessageSizes, Topology
from zerosync_strategy.core.comm.streams import Streams
from zerosync_strategy.core.engine import hooks, patches, zero, zero3
from zerosync_strategy.core.engine.parameter import CONTEXT, Record
from zerosync_strategy.core.engine.several import first_of
from zerosync_strategy.core.engine.types import DeepSpeedEngine, Zero3Parameter
from zerosync_strategy.core.failures.rank_status import rank_status
from zerosync_strategy.core.options import ZeroSyncConfig
from zerosync_strategy.core.params.cache import ParameterCache
from zerosync_strategy.core.params.copies import HostCache, NodeShards
from zerosync_strategy.core.params.held import HoldPlan
from zerosync_strategy.core.params.intercepted import class_at_rest, read_in_transforms
from zerosync_strategy.core.params.issuing import EngineWindow
from zerosync_strategy.core.params.scheduler import GatherScheduler
from zerosync_strategy.core.params.shard_groups import gather_groups
from zerosync_strategy.core.params.unit_hooks import UnitHooks
from zerosync_strategy.core.params.units import Units
from zerosync_strategy.core.params.unshard_on_read import UnshardOnRead
from zerosync_strategy.core.params.values import ParameterValues


class ModuleParameters:
    """Gathers, holds and reads the parameters of a module. Made for the first engine of the module, with its options.

    :attr:`hooks` gather each of :attr:`units` as a whole. :attr:`unshard_on_read` is ``None`` without ``eager_frames``;
    :attr:`times_written` counts steps and checkpoints.
    """

    def __init__(
        self, engine: DeepSpeedEngine, config: ZeroSyncConfig, streams: Streams, sizes: MessageSizes,
        topology: Topology, is_constant: Callable[[Zero3Parameter], bool],
    ) -> None:  # fmt: skip
        self.units = Units(engine, config.unit_modules or ())
        self._engine = engine
        self._windows: list[EngineWindow] = []  # of the engines that use it
        self.times_written = 0
        self._records_of: dict[nn.Module, list[Record]] = {}  # by the module of each engine
        groups = gather_groups(engine, topology, streams, config.unshard_streams == "own_communicator")
        host = None if config.parameters.host == 0 else HostCache(config.parameters.host, streams)
        shared = config.parameters.node_in_device
        limit = config.parameters.device if shared else config.parameters.node
        has_levels = any(group.nodes is not None for group in groups.values())
        keeps = has_levels and config.parameters.keeps_node_shards
        node_shards = NodeShards(limit, shared) if keeps else None
        for group in groups.values():
            if node_shards is not None and group.nodes is not None:
                group.nodes.connect(engine.device)
        self.scheduler = GatherScheduler(engine, self._windows, streams, sizes, groups, host, node_shards)
        self.units.gather_together()
        budget, automatic = config.parameters.device, config.parameters.automatic
        plan = HoldPlan(self.scheduler, budget, automatic, is_constant)
        self.cache = ParameterCache(self.units.every, self.scheduler, plan)
        hooks.remove_stock(engine)
        self.hooks = UnitHooks(engine, self.units.every, self.scheduler, self.cache)
        self.values = ParameterValues(self.scheduler, self.hooks, class_at_rest, config.eager_frames)
        read_in_transforms()
        self.unshard_on_read = UnshardOnRead(engine, self.values) if config.eager_frames else None
        engine._zerosync_parameters = self

    @classmethod
    def of(
        cls, engine: DeepSpeedEngine, config: ZeroSyncConfig, streams: Streams, sizes: MessageSizes,
        topology: Topology, is_constant: Callable[[Zero3Parameter], bool], window: EngineWindow,
    ) -> ModuleParameters:  # fmt: skip
        """Return the :class:`ModuleParameters` of the module of ``engine``, which uses it with ``window``.

        ``is_constant`` returns whether no optimizer trains a parameter. Raise ``ValueError`` if the module has another
        engine that gathers by itself, or one with options that conflict with ``config``.
        """
        found: ModuleParameters | None = vars(first_of(engine)).get("_zerosync_parameters")
        if found is None:
            _require_ungathered(engine)
            found = cls(engine, config, streams, sizes, topology, is_constant)
        elif config.parameters.automatic or found.cache.plan.automatic:
            raise ValueError(
                "ZeroSync option 'param_memory_budget' got \"auto\" with several optimizers for one module. Their"
                " windows overlap, so that what is held cannot change between two. Give a size."
            )
        elif config.eager_frames is (found.unshard_on_read is None):
            raise ValueError(
                f"ZeroSync option 'eager_frames' got {config.eager_frames}, and another optimizer of the module has the"
                " other value. What reads a parameter does not say for which of them: give both the same."
            )
        found._windows.append(window)
        found.cache.plan.forget_constants()  # this engine may train what the others do not
        return found

    def detach(self, window: EngineWindow) -> None:
        """Leave out the engine of ``window``. After the last, give parameters, modules and hooks back to DeepSpeed."""
        self._windows.remove(window)
        if self._windows:
            return
        self.hooks.remove()
        if self.unshard_on_read is not None:
            self.unshard_on_read.detach()
        self.values.detach()
        self.cache.detach()
        del self._engine._zerosync_parameters
        self.scheduler.detach()
        hooks.restore_stock(self._engine)

    def forward_begins(self) -> None:
        if self.unshard_on_read is not None:
            self.unshard_on_read.forward_begins()

    def recover(self) -> None:
        """After an exception, reshard all but held and persistent parameters and those of contexts."""
        self.hooks.recover()
        self.cache.recover()

    def release(self, module: nn.Module) -> None:
        """Reshard an engine's ``module`` before a step or a checkpoint; see :meth:`ParameterCache.release`."""
        if module not in self._records_of:
            params = set(module.parameters())
            self._records_of[module] = [record for record in self.scheduler.records if record.param in params]
        self.hooks.end_uses()
        self.cache.release(self._records_of[module])

    def written(self, by_step: bool) -> None:
        """Record that an optimizer step or a checkpoint has written the shards, on the current stream."""
        unchanged = set(self.cache.plan.constants) if by_step else set()
        for record in self.scheduler.records:
            record.writes += record not in unchanged
        self.times_written += 1
        self.scheduler.streams.record_write()
        self.values.written(by_step)


def _require_ungathered(engine: DeepSpeedEngine) -> None:
    """Raise ``ValueError`` if an attached engine with its own hooks gathers a parameter of ``engine``."""
    for name, param in engine.module.named_parameters():
        if "_zerosync_record" in param.__dict__:
            raise ValueError(
                f"attach() got an engine of ZeRO-3 with a parameter, {name!r}, that another attached engine gathers and"
                " releases, too. Give one engine one optimizer for all parameters of the module; or train with several"
                " optimizers under Lightning, whose engines share. Where the other engine is done, as that of an"
                " earlier Trainer, call its destroy() first (of a Trainer: trainer.model_wrapped.destroy())."
            )


# ---- full parameters: to read and write ------------------------------------------------------------------------------


@contextmanager
def full_parameters(engine: DeepSpeedEngine, parameters: Iterable[nn.Parameter] | None = None) -> Iterator[None]:
    """While active, ``parameters`` (by default all) are full, and what is written to them is kept. Collective.

    It leaves out what a context around this one has gathered, which writes that back.
    """
    if zero.stage(engine) != 3:
        yield
        return
    params = engine.module.parameters() if parameters is None else parameters
    with _gathered([param for param in params if not _is_in_context(param)], modifier_rank=0):
        yield


def _is_in_context(param: nn.Parameter) -> bool:
    record = getattr(param, "_zerosync_record", None)
    return record is not None and bool(record.bits & CONTEXT)


def _gathered(params: list[nn.Parameter], modifier_rank: int | None = None) -> AbstractContextManager[None]:
    from deepspeed import zero as deepspeed_zero

    gathered: AbstractContextManager[None] = deepspeed_zero.GatheredParameters(params, modifier_rank=modifier_rank)
    return gathered


# ---- averages ----------------------------------------------------------------------------------------------------


def let_average() -> None:
    """Make ``AveragedModel.update_parameters`` in this process gather sharded parameters. It is then collective.

    For a model without sharded parameters, it does not change.
    """
    patches.wrap(patches.MAKE_AVERAGE, _init)
    patches.wrap(patches.UPDATE_AVERAGE, _update_parameters)


def _init(
    stock: Callable[..., None], average: AveragedModel, model: nn.Module, *args: object, **kwargs: object
) -> None:
    if problem := copy_problem(model):
        raise ValueError(f"AveragedModel() {problem}")
    stock(average, model, *args, **kwargs)


def _update_parameters(stock: Callable[..., None], average: AveragedModel, model: nn.Module) -> None:
    if not any(map(zero3.is_sharded, model.parameters())):
        return stock(average, model)
    activity = rank_status().activity("AveragedModel.update_parameters()", lambda: "between two steps")
    with activity, readable(model.parameters()):
        stock(average, model)


def copy_problem(model: nn.Module) -> str:
    """Return why ``model`` cannot be copied to average it, as the predicate of a sentence; empty if it can."""
    if not any(map(zero3.is_sharded, model.parameters())):
        return ""
    return (
        f"found a {type(model).__name__} whose parameters ZeRO-3 has sharded, so that a copy would have none. Average a"
        " copy that is made before the engine is built: before deepspeed.initialize() or accelerator.prepare(), and in"
        " Lightning with a new module for each fit()."
    )


def readable(parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
    """While active, ``parameters`` are full; those that a caller has gathered stay gathered. Collective."""
    return _gathered([param for param in parameters if not zero3.is_gathered(param)])
