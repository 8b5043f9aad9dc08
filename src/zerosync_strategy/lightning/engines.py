"""One engine per optimizer: the division of the parameters, and checkpoints.

A checkpoint is a directory. Lightning and the first engine save to the same files as with a single optimizer. The
engine of optimizer k saves a DeepSpeed checkpoint of that optimizer's parameters to ``optimizer_<k>`` in the directory.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from zerosync_strategy import frontend
from zerosync_strategy.core.engine.contract import fetch
from zerosync_strategy.core.options import ZeroSyncConfig
from zerosync_strategy.frontend import SavedCheckpoint, ZeroSync

from .contract import NO_OPTIMIZER
from .library import MisconfigurationException

TAG = "checkpoint"
"""Lightning's name of the checkpoint within its directory."""


def divide(
    module: torch.nn.Module, optimizers: Sequence[Optimizer], elementwise: bool | str = False
) -> list[torch.nn.Module]:
    """Return the part of ``module`` that each optimizer trains. The first part also has what no optimizer trains.

    Args:
        elementwise: the option ``elementwise_optimizer``.

    Raises:
        MisconfigurationException: there is no optimizer; ZeRO cannot partition one; one has no trainable parameter, or
            a parameter that is not in ``module``; or two optimizers train the same parameter.
    """
    owners: dict[torch.nn.Parameter, int] = {}
    shared: dict[torch.nn.Parameter, list[int]] = {}
    for index, optimizer in enumerate(optimizers):
        if isinstance(optimizer, fetch(NO_OPTIMIZER)):
            raise MisconfigurationException(
                "configure_optimizers() returned no optimizer, and ZeRO shards what an optimizer trains. Return one, or"
                " train with another strategy, such as 'ddp'."
            )
        if problem := frontend.optimizer_problem(module, optimizer, elementwise):
            raise MisconfigurationException(
                f"ZeroSyncStrategy cannot train with optimizer {index} of configure_optimizers(): {problem}"
            )
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if not any(param.requires_grad for param in params):
            raise MisconfigurationException(
                f"Optimizer {index} of configure_optimizers() has no parameter that requires a gradient. Leave it out,"
                " or let its parameters require one; they can be frozen later."
            )
        for param in params:
            if owners.setdefault(param, index) != index:
                shared.setdefault(param, [owners[param]]).append(index)
    if len(optimizers) == 1:
        return [module]

    names = {param: name for name, param in module.named_parameters()}
    if shared:
        found = "; ".join(f"{names[param]} in {_listed(which)}" for param, which in shared.items())
        raise MisconfigurationException(
            "ZeRO keeps the state of each parameter with one optimizer, but configure_optimizers() returned optimizers"
            f" that share some: {found}. Give each parameter to one of them."
        )
    return [
        frontend.parameter_tree(module, {p for p in names if owners.get(p, 0) == index})
        for index in range(len(optimizers))
    ]


def _listed(indices: Sequence[int]) -> str:
    return "optimizers " + " and ".join(map(str, indices))


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def directory(checkpoint: str | Path, index: int) -> Path:
    """Return the directory to which the engine of optimizer ``index``, from 1, saves."""
    return Path(checkpoint) / f"optimizer_{index}"


def count_saved(checkpoint: str | Path) -> int:
    """Return the number of optimizers in a checkpoint."""
    return 1 + sum(1 for _ in Path(checkpoint).glob("optimizer_[0-9]*"))


def remove_others(checkpoint: str | Path, engines: int) -> None:
    """Remove the directories of further optimizers that an earlier run with more than ``engines`` has saved."""
    for index in range(engines, count_saved(checkpoint)):
        shutil.rmtree(directory(checkpoint, index), ignore_errors=True)


def check_full_weights(module: torch.nn.Module, state: Mapping[str, object], strict: bool) -> None:
    """Check that ``state``, from one file, fits ``module`` under ZeRO-3. Lightning would skip entries that do not.

    Raises:
        MisconfigurationException: groups of ranks have different values of a parameter.
        RuntimeError: with ``strict``, names or shapes differ; as in ``Module.load_state_dict``.
    """
    if any(map(frontend.has_own_group, module.parameters())):
        raise MisconfigurationException(
            "load_full_weights=True loads one file, which has one value of each parameter, but some are sharded over"
            " groups of ranks, each of which has its own. Load a checkpoint that is a directory, without"
            " load_full_weights, or give each rank its part by load_full_state() of strategy.zerosync."
        )
    own = {name: _shape(value) for name, value in module.state_dict(keep_vars=True).items()}
    given = {name: _shape(value) for name, value in state.items()}
    differing = [name for name in {**own, **given} if own.get(name, "nothing") != given.get(name, "nothing")]
    if strict and differing:
        shown = "; ".join(
            f"{name!r}: {given.get(name, 'nothing')} for {own.get(name, 'nothing')}" for name in differing[:5]
        )
        more = f"; and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise RuntimeError(
            f"load_full_weights=True found another module in the checkpoint: {shown}{more}. With strict_loading=False,"
            " the LightningModule loads what fits."
        )


def _shape(value: object) -> object:
    return frontend.full_shape(value) if isinstance(value, torch.Tensor) else ()


class EvaluationOverrides(frontend.ModeOverrides):
    """Overrides of an engine for evaluation, which has no optimizer: it loads distributed checkpoints, too."""

    def load_checkpoint(self, load_dir: Any, *args: object, load_module_strict: bool = True, **kwargs: Any) -> Any:
        if not frontend.is_distributed(Path(load_dir) / TAG):
            return super().load_checkpoint(load_dir, *args, load_module_strict=load_module_strict, **kwargs)
        engine: Any = self
        module = engine.module
        state, client_state = frontend.weights_and_client_state(Path(load_dir) / TAG, module)
        for index in range(1, count_saved(load_dir)):
            state |= frontend.weights_and_client_state(directory(load_dir, index) / TAG, module)[0]
        frontend.load_full(module, state, load_module_strict, isinstance(self, frontend.FrozenStay))
        return load_dir, client_state


class ShardedEvaluationOverrides(EvaluationOverrides):
    """The same under ZeRO-3: parameters of all optimizers are loaded.

    DeepSpeed would load only those of the first optimizer, from its optimizer states, which hold them under ZeRO-3.
    """

    def load_checkpoint(self, load_dir: Any, *args: object, load_module_strict: bool = True, **kwargs: Any) -> Any:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        if frontend.is_distributed(Path(load_dir) / TAG):
            return super().load_checkpoint(load_dir, *args, load_module_strict=load_module_strict, **kwargs)
        others: dict[str, torch.Tensor] = {}
        for index in range(1, count_saved(load_dir)):
            others |= get_fp32_state_dict_from_zero_checkpoint(directory(load_dir, index), TAG)

        def load(src: dict[str, Any], dst: torch.nn.Module) -> None:
            dst.load_state_dict({**src, **others}, strict=load_module_strict)

        with frontend.loading_without_optimizer(self):
            return super().load_checkpoint(load_dir, *args, custom_load_fn=load, **kwargs)


def verified_together(
    zerosyncs: list[ZeroSync], path: str | Path, saved: int, options: ZeroSyncConfig, stage: int
) -> AbstractContextManager[None]:
    """Around the loading of ``saved`` engines: their checkpoints are verified first. One in training does so itself."""
    if len(zerosyncs) == 1 or not Path(path).is_dir():
        return nullcontext()
    places = [Path(path), *(directory(path, index) for index in range(1, saved))]
    if zerosyncs:
        pairs = zip(zerosyncs, places, strict=True)
        return frontend.one_load([frontend.checkpoint_of(zerosync, place, None, True) for zerosync, place in pairs])
    return frontend.one_load(
        [SavedCheckpoint(place, None, options.checkpoint_checksums, stage == 3) for place in places]
    )
