"""The arguments of a strategy: ZeroSync's options, those of the framework's own strategy, a DeepSpeed configuration."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_type_hints

from zerosync_strategy.core.options import AUTO, BLOCK, ZeroSyncConfig, refuse_removed, suggest

_PRECISIONS = {"fp16": ("16-mixed", "16-true"), "bf16": ("bf16-mixed", "bf16-true")}
_MADE_BY_PROGRAMS = ("optimizer", "scheduler")
# Arguments of a framework's strategy that are no part of a DeepSpeed configuration, and so may be given with one.
_WITH_CONFIG = frozenset({
    "accelerator", "cluster_environment", "exclude_frozen_parameters", "hysteresis", "initial_scale_power",
    "load_full_weights", "logging_level", "loss_scale", "loss_scale_window", "min_loss_scale", "parallel_devices",
    "precision", "precision_plugin", "process_group_backend", "remote_device", "timeout",
})  # fmt: skip


class StrategyArguments:
    """The arguments of a strategy that is built on ``stock``, the framework's own strategy for DeepSpeed.

    ``None`` means that an option is not given. LightningCLI gives all options, also at their defaults, but options that
    a DeepSpeed configuration contains cannot be given with one. Options that may be given with a configuration have
    their own defaults.

    Contradictions raise ``error``. ``owner`` is the strategy's name, for errors.
    """

    def __init__(self, owner: str, stock: Any, error: type[Exception]) -> None:
        self._owner = owner
        self._stock = stock
        self._parameters = inspect.signature(stock.__init__).parameters
        self._with_config = _WITH_CONFIG & self._parameters.keys()
        self._error = error

    def split(self, stage: Any, config: Any, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the ``options`` of ZeroSync, and those of ``stock``.

        Raises a ``TypeError`` if an option is unknown, a ``ValueError`` if it was removed, and ``error`` if the stage
        is not 1, 2 or 3, or if ``config`` would override an option.
        """
        options = {name: value for name, value in options.items() if value is not None or name in self._with_config}
        ours = {name: options.pop(name) for name in ZeroSyncConfig.option_names() & options.keys()}
        for name in options:
            if name not in self._parameters or name == "self":
                refuse_removed(options)
                known = self._parameters.keys() - {"self"} | ZeroSyncConfig.option_names() | {"stage", "config"}
                raise TypeError(f"{self._owner} got an unknown option {name!r}.{suggest(name, frozenset(known))}")
        if config is not None and (ignored := options.keys() - self._with_config):
            raise self._error(
                f"{self._owner} got config= and also {', '.join(sorted(ignored))}, which a given configuration would"
                " override. Put them into the configuration."
            )
        if stage is not None:
            self._check_stage(stage, "stage")
        return ours, options

    def read(
        self, built: dict[str, Any], stage: int | None, config: object, ours: Mapping[str, Any]
    ) -> tuple[ZeroSyncConfig, int]:
        """Take ZeroSync's block out of a DeepSpeed configuration; return ZeroSync's options and the ZeRO stage.

        Raises the errors of :meth:`ZeroSyncConfig.resolve`, and ``error`` if the stage is not 1, 2 or 3, or differs
        from ``stage``.

        Args:
            built: the configuration that ``stock`` has made, from the arguments or from a given configuration.
            stage: the argument; the default is 3, if the configuration has no stage either.
            config: the argument. A configuration given here or in the environment may leave values open.
            ours: ZeroSync's options as arguments.
        """
        options = ZeroSyncConfig.resolve(built.pop(BLOCK, None), ours)
        if config is not None or self._stock.DEEPSPEED_ENV_VAR in os.environ:
            fill_in(built, 3 if stage is None else stage)
        configured = built.get("zero_optimization", {}).get("stage", 0)
        self._check_stage(configured, "config['zero_optimization']['stage']")
        if stage is not None and configured != stage:
            raise self._error(
                f"{self._owner} got stage={stage}, but the DeepSpeed configuration says stage {configured}. Give the"
                " stage in one place."
            )
        return options, int(configured)

    @staticmethod
    def undecided(config: dict[str, Any]) -> tuple[str, ...]:
        """Return the path of an ``"auto"`` in the optimizer or scheduler, which have no defaults; empty if none."""
        return next((path for path in _autos(config) if path[0] in _MADE_BY_PROGRAMS), ())

    @staticmethod
    def fill_in_precision(config: dict[str, Any], precision: str) -> None:
        """Enable the dtypes that ``config`` leaves to ``"auto"`` as the framework's ``precision`` says."""
        for dtype, precisions in _PRECISIONS.items():
            if config.get(dtype, {}).get("enabled") == AUTO:
                config[dtype]["enabled"] = precision in precisions

    def _check_stage(self, stage: object, name: str) -> None:
        if stage not in (1, 2, 3) or isinstance(stage, bool):
            raise self._error(
                f"{self._owner} needs ZeRO stage 1, 2 or 3, got {name}={stage!r}. Without ZeRO, use Lightning's"
                " DDPStrategy."
            )

    def name_all(self, init: Callable[..., None]) -> Callable[..., None]:
        """Give ``init`` the signature that names every option, which LightningCLI, help texts and editors read."""
        keyword = inspect.Parameter.KEYWORD_ONLY
        stock_types = get_type_hints(self._stock.__init__)
        parameters = {
            "self": inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
            "stage": inspect.Parameter("stage", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None),
            "config": inspect.Parameter("config", keyword, default=None),
        }
        types: dict[str, Any] = {"stage": int | None, "config": dict[str, Any] | str | os.PathLike[str] | None}
        for name, type_ in get_type_hints(ZeroSyncConfig).items():
            parameters[name] = inspect.Parameter(name, keyword, default=None)
            types[name] = type_ | None
        for name, parameter in self._parameters.items():
            if name not in parameters:
                stays = name in self._with_config
                parameters[name] = inspect.Parameter(name, keyword, default=parameter.default if stays else None)
                types[name] = stock_types[name] if stays else stock_types[name] | None
        init.__annotations__ = {**types, "return": None}
        signature = [p.replace(annotation=types.get(name, p.empty)) for name, p in parameters.items()]
        init.__signature__ = inspect.Signature(signature, return_annotation=None)  # type: ignore[attr-defined]
        return init


def fill_in(config: dict[str, Any], stage: int) -> None:
    """Set the ZeRO ``stage`` in ``config`` if it has none, and remove each ``"auto"`` that has a default.

    An ``"auto"`` in the optimizer or the scheduler has none and stays: see :meth:`StrategyArguments.undecided`.
    """
    zero = config.setdefault("zero_optimization", {})
    if zero.get("stage", AUTO) == AUTO:
        zero["stage"] = stage
    # DeepSpeed tests few optimizers. ZeroSync refuses those that are wrong on its shards.
    config.setdefault("zero_allow_untested_optimizer", True)
    for path in list(_autos(config)):
        *blocks, name = path
        if path[0] in _MADE_BY_PROGRAMS:
            continue
        if name == "enabled" and blocks and blocks[0] in _PRECISIONS:
            continue  # decided once the precision is known
        block = config
        for key in blocks:
            block = block[key]
        del block[name]


def _autos(config: dict[str, Any], *path: str) -> Iterator[tuple[str, ...]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _autos(value, *path, name)
        elif value == AUTO:
            yield (*path, name)
