"""The four methods of Accelerate that are replaced. Without a ``"zerosync"`` block they do what they did."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from accelerate.accelerator import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType, parse_flag_from_env

from zerosync_strategy.accelerate import contract
from zerosync_strategy.accelerate.plugin import ZeroSyncPlugin, read_config
from zerosync_strategy.accelerate.wrappers import prepare
from zerosync_strategy.core.engine import patches
from zerosync_strategy.core.engine.contract import require
from zerosync_strategy.core.options import BLOCK
from zerosync_strategy.frontend import prepare_device

_always = False  # use ZeroSync for every DeepSpeed configuration of this process, also without a block


def install(always: bool = False) -> None:
    """Make DeepSpeed configurations with a ``"zerosync"`` block train with ZeroSync; with ``always``, all of them.

    Raises:
        ContractError: ZeroSync does not know the internals of the installed Accelerate.
    """
    global _always
    _always |= always
    if not patches.is_installed(patches.ACCELERATE_PLUGIN):
        require(contract.INTERNALS)
    patches.replace(patches.ACCELERATE_PLUGIN, _post_init)
    patches.replace(patches.ACCELERATE_PREPARE, _prepare_deepspeed)
    patches.replace(patches.ACCELERATE_BACKEND, _prepare_backend)
    patches.replace(patches.ACCELERATE_STATE, _init_state)


def _post_init(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def post_init(self: DeepSpeedPlugin) -> None:
        """Turn any plugin with a block into a :class:`ZeroSyncPlugin`."""
        if not isinstance(self, ZeroSyncPlugin) and (_always or _has_block(self.hf_ds_config)):
            self.__class__ = ZeroSyncPlugin
            return self.__post_init__()
        stock(self)

    return post_init


def _prepare_deepspeed(stock: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(stock)
    def prepare_deepspeed(self: Accelerator, *args: object) -> object:
        plugin = self.deepspeed_plugin
        return prepare(self, plugin, args, stock) if isinstance(plugin, ZeroSyncPlugin) else stock(self, *args)

    return prepare_deepspeed


def _prepare_backend(stock: Callable[..., Any]) -> Callable[..., object]:
    @functools.wraps(stock)
    def prepare_backend(self: PartialState, cpu: bool = False, *args: object, **kwargs: object) -> object:
        """Return gloo on a machine without accelerator. Stock returns no backend, so that each rank trains alone.

        Before Accelerate 1.15 stock returns gloo, but DeepSpeed compiles its extension.
        """
        ours = _is_ours()
        backend, distributed_type = stock(self, cpu, *args, **kwargs)
        on_cpu = distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU)
        if ours and on_cpu and "LOCAL_RANK" in os.environ:
            prepare_device("cpu")
            if cpu:  # from TrainingArguments(use_cpu=True); then stock returns gloo
                return backend, distributed_type
            return "gloo", DistributedType.NO  # later replaced by DistributedType.DEEPSPEED
        return backend, distributed_type

    return prepare_backend


def _init_state(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def init(
        self: AcceleratorState, mixed_precision: str | None = None, cpu: bool = False, *args: object, **kwargs: object
    ) -> None:
        """Refuse ``cpu=True``, with which stock would train without DeepSpeed."""
        if (cpu or parse_flag_from_env("ACCELERATE_USE_CPU")) and _is_ours():
            raise ValueError(
                "Accelerate got cpu=True or ACCELERATE_USE_CPU, which switches DeepSpeed off, and with it ZeroSync."
                " Leave it out: without a GPU, or with CUDA_VISIBLE_DEVICES set to nothing, ZeroSync trains on the CPU."
            )
        stock(self, mixed_precision, cpu, *args, **kwargs)

    return init


def _is_ours() -> bool:
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    return deepspeed and (_always or ZeroSyncPlugin.used or _has_block())


def _has_block(given: object = None) -> bool:
    config = read_config(given)
    return config is not None and BLOCK in config.config
