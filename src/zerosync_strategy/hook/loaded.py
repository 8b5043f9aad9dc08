"""Installs ZeroSync once a program has imported Accelerate or DeepSpeed."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from zerosync_strategy.core.announcement import note
from zerosync_strategy.core.engine import patches
from zerosync_strategy.core.engine.contract import ContractError
from zerosync_strategy.core.engine.types import DeepSpeedEngine
from zerosync_strategy.core.options import BLOCK
from zerosync_strategy.names import register_with

_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")


def loaded(name: str) -> None:
    """Install ZeroSync for a program that has imported ``name``."""
    if name == "deepspeed":
        if "RANK" in os.environ:  # a rank and not its launcher, before it makes the process group
            _prepare()
        patches.replace(patches.INITIALIZE, _initialize)
    elif name == "accelerate":
        _install()
    else:
        register_with(name.removesuffix(".strategies"))


def _install() -> None:
    try:
        from zerosync_strategy.accelerate import install
    except (ContractError, ImportError) as error:  # of no interest to a program that trains without DeepSpeed
        patches.replace(patches.ACCELERATE_PLUGIN, functools.partial(_refuse, error=error))
    else:
        install.install(always=True)


def _refuse(stock: Callable[..., None], error: Exception) -> Callable[..., None]:
    """Make a DeepSpeed configuration raise ``error``."""

    @functools.wraps(stock)
    def post_init(self: object) -> None:
        stock(self)
        raise error

    return post_init


def _initialize(stock: Callable[..., Any]) -> Callable[..., object]:
    """Attach to engines that a program makes itself. Frontends attach to the engines of frameworks."""

    @functools.wraps(stock)
    def initialize(*args: object, **kwargs: object) -> object:
        from zerosync_strategy.core.engine import zero

        if zero.is_building_engine():
            return stock(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "").split(".")[0]
        _prepare()
        result = stock(*args, **kwargs)
        engine = result[0]
        block = BLOCK in zero.user_config(engine)
        if not block and _left_alone(engine, caller):
            return result
        if caller in _LIGHTNING:
            raise ValueError(
                f"Lightning's own DeepSpeedStrategy got a DeepSpeed configuration with a {BLOCK!r} block, and would"
                " train without ZeroSync. Give strategy=ZeroSyncStrategy(config=...), or under Fabric"
                " ZeroSyncFabricStrategy(config=...)."
            )
        if zero.trains(engine):  # not an engine for evaluation alone, of which a trainer gives the same configuration
            _attach(engine)
        return result

    return initialize


def _prepare() -> None:
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator

    from zerosync_strategy.core.engine.compat import prepare_cpu

    if get_accelerator().device_name() == "cpu" and not comm.is_initialized():
        prepare_cpu()


def _left_alone(engine: DeepSpeedEngine, caller: str) -> bool:
    """Return whether ZeroSync leaves an engine without a block alone, and note the reason for ``zerosync run``."""
    from zerosync_strategy.core.engine import zero

    if caller in _LIGHTNING:
        note("Lightning's own DeepSpeedStrategy trained without ZeroSync; give strategy=ZeroSyncStrategy() instead")
    elif not zero.trains(engine):
        note("an engine without an optimizer was made, which trains nothing")
    elif problem := zero.without_zero(engine):
        note(f"an engine {problem} was left as it is")
    else:
        return False
    return True


def _attach(engine: DeepSpeedEngine) -> None:
    from zerosync_strategy.core.attaching import attach

    attach(engine).may_be_replaced = True
