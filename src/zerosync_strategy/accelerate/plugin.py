"""``Accelerator(deepspeed_plugin=ZeroSyncPlugin(stage=3))``: the configuration. ``wrappers.py`` has the training."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import DeepSpeedPlugin
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from torch.utils.data import DataLoader

from zerosync_strategy import frontend
from zerosync_strategy.accelerate import contract, trainer
from zerosync_strategy.core.engine.contract import require
from zerosync_strategy.core.options import AUTO, BLOCK, ZeroSyncConfig, suggest

ON_BACKWARD = "backward"
STEP_ON = (AUTO, "optimizer", ON_BACKWARD)
"""The values of the option ``step_on``: where a program takes its optimizer steps."""

_STOCK_FIELDS = frozenset(field.name for field in dataclasses.fields(DeepSpeedPlugin))


@dataclasses.dataclass(frozen=True)
class AccelerateConfig(ZeroSyncConfig):
    """The options of ZeroSync, and one that only Accelerate has.

    Args:
        step_on: ``"optimizer"``: the optimizer step is taken in ``optimizer.step()``, after any number of backwards, as
            in PyTorch. ``"backward"``: the step is taken in ``accelerator.backward()`` whenever Accelerate synchronises
            gradients, and ``zero_grad()`` does nothing, as in Accelerate with DeepSpeed. ``"auto"``: as
            ``"optimizer"``, and a program that goes on to a second window without ever stepping is an error.
    """

    step_on: str = AUTO

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_on not in STEP_ON:
            raise ValueError(f"ZeroSync option 'step_on' takes one of {', '.join(STEP_ON)}, got {self.step_on!r}.")


class ZeroSyncPlugin(DeepSpeedPlugin):
    """A ``DeepSpeedPlugin`` that trains with one gradient reduction per optimizer step, taken in ``optimizer.step()``.

    Args:
        stage: ZeRO stage 1, 2 or 3. Without it, the stage of the DeepSpeed or Accelerate configuration, or 2 if they
            have none or ``"auto"``.
        **options: any field of :class:`AccelerateConfig`, which may also be in a ``"zerosync"`` block of the DeepSpeed
            configuration, and any field of Accelerate's ``DeepSpeedPlugin``.

    Attributes:
        zerosync_config: the options of ZeroSync.

    Raises:
        TypeError, ValueError: an unknown option, a value of the wrong kind, or options that contradict each other.
        ContractError: Accelerate's internals are not the ones that ZeroSync knows (C1).
    """

    used = False
    """Whether this process has made a plugin; then it trains with DeepSpeed on CPU, too."""

    zero3_save_16bit_model: bool | None

    # Defaults for a plugin that Accelerate has made, and to which install.py has given this class.
    _stage: int | None = None
    _options: dict[str, Any] = {}  # noqa: RUF012
    _filled: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, stage: int | None = None, **options: Any) -> None:
        require(contract.INTERNALS)
        ours = AccelerateConfig.option_names()
        for name in options:
            if name not in ours | _STOCK_FIELDS:
                frontend.refuse_removed(options)
                known = ours | _STOCK_FIELDS | {"stage"}
                raise TypeError(f"ZeroSyncPlugin got an unknown option {name!r}.{suggest(name, known)}")
        self._stage = stage
        self._options = {name: options.pop(name) for name in ours & options.keys()}
        super().__init__(**options)

    def __post_init__(self) -> None:
        given = self.hf_ds_config
        self.hf_ds_config: HfDeepSpeedConfig | None = read_config(given)
        self.zero_stage = self._one_stage()
        # By default, save the weights under ZeRO-3; DeepSpeed's own default writes none.
        if self.zero3_save_16bit_model is None and "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL" not in os.environ:
            self.zero3_save_16bit_model = self.zero_stage == 3
        if self.hf_ds_config is not None:
            config = self.hf_ds_config.config
            zero = config.setdefault("zero_optimization", {})
            if zero.get("stage", "auto") == "auto":
                zero["stage"] = self.zero_stage
            if self.zero_stage == 3:
                zero.setdefault("stage3_gather_16bit_weights_on_model_save", "auto")  # the field decides
        if self.hf_ds_config is not None and self.hf_ds_config is not given:  # the Trainer's configuration has these
            # The Accelerator decides what the configuration leaves out.
            config.setdefault("gradient_accumulation_steps", "auto")
            if "train_batch_size" not in config:
                config.setdefault("train_micro_batch_size_per_gpu", "auto")
        super().__post_init__()
        self.zerosync_config = AccelerateConfig.resolve(self.deepspeed_config.get(BLOCK), self._options)
        ZeroSyncPlugin.used = True
        self.patch_process()
        frontend.share_process_group()  # TrainingArguments(use_cpu=True) makes one

    def patch_process(self) -> None:
        """Install the replacements in the process, while this plugin lives or until its training ends."""
        frontend.prepare_process(self, nested_init=self.zero_stage != 3)

    def _one_stage(self) -> int:
        launched = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")
        asked = {
            "stage": self._stage,
            "zero_stage": self.zero_stage,
            "zero_stage of the Accelerate configuration": None if launched is None else int(launched),
            "'zero_optimization.stage' of the DeepSpeed configuration": self.hf_ds_config
            and self.hf_ds_config.get_value("zero_optimization.stage"),
        }
        stages = {source: stage for source, stage in asked.items() if stage not in (None, "auto")}
        found = ", ".join(f"{source} = {stage!r}" for source, stage in stages.items())
        if len(set(stages.values())) > 1:
            raise ValueError(f"ZeroSyncPlugin got different ZeRO stages: {found}. Give the stage in one place.")
        stage = next(iter(stages.values()), 2)
        if stage not in (1, 2, 3) or isinstance(stage, bool):
            raise ValueError(
                f"ZeroSyncPlugin needs ZeRO stage 1, 2 or 3, got {found}. Without ZeRO, use Accelerate without"
                " DeepSpeed."
            )
        return int(stage)

    def set_deepspeed_weakref(self) -> None:
        # Stock informs transformers how to build models. ZeroSync does not need transformers.
        if importlib.util.find_spec("transformers") is not None:
            super().set_deepspeed_weakref()
            trainer.install(ZeroSyncPlugin)

    @contextmanager
    def filled_in(self, prepared: Iterable[object]) -> Iterator[None]:
        """Around ``prepare(*prepared)``: replace values of "auto" for which Accelerate would raise or choose badly."""
        config, filled = self.deepspeed_config, self._filled
        if any(isinstance(item, torch.nn.Module) for item in prepared):
            # Undo the replacements of "auto" that were made for another model.
            config.update({name: "auto" for name, value in filled.items() if config.get(name) == value})
            self._filled = {}
        left_open = [name for name, value in config.items() if value == "auto"]
        # By default, Accelerate and DeepSpeed would clip to a norm of 1.
        if config.get("gradient_clipping", "auto") == "auto":
            config["gradient_clipping"] = 0.0
        # Only DeepSpeed's log uses the batch size, so it is no error if the loaders do not have it.
        sizes = [loader.batch_size for loader in prepared if isinstance(loader, DataLoader)]
        if self.is_auto("train_micro_batch_size_per_gpu") and (not sizes or None in sizes):
            before = filled.get("train_micro_batch_size_per_gpu", "auto")
            config["train_micro_batch_size_per_gpu"] = 1 if before == "auto" else before
        block = config.pop(BLOCK, None)  # Accelerate would look for "auto" in it, too
        try:
            with _taken_as_it_is(config, prepared):
                yield
        finally:
            if block is not None:
                config[BLOCK] = block
        self._filled = self._filled | {name: config.get(name) for name in left_open}


@contextmanager
def _taken_as_it_is(config: dict[str, Any], prepared: Iterable[object]) -> Iterator[None]:
    """While active, Accelerate uses an offloaded optimizer as given, and does not replace it by DeepSpeed's CPU Adam.

    Stock does so silently, for any optimizer.
    """
    option = "zero_force_ds_cpu_optimizer"
    optimizers = [item for item in prepared if isinstance(item, torch.optim.Optimizer)]
    others = [optimizer for optimizer in optimizers if not _is_plain_adam(optimizer)]
    if not frontend.offloads_optimizer(config) or not others:
        yield
        return
    if config.get(option):
        raise ValueError(
            f"accelerator.prepare() got the optimizer {type(others[0]).__name__} and {option!r} = true, by which"
            " Accelerate would train with DeepSpeed's CPU Adam in its place. Leave the option out to train with the"
            " optimizer as it is, or give torch's Adam or AdamW."
        )
    before, config[option] = config.get(option), False
    yield
    if before is None:
        del config[option]


def _is_plain_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether DeepSpeed's CPU Adam steps as ``optimizer`` does."""
    different = ["amsgrad", "maximize"]
    if type(optimizer) is torch.optim.Adam:
        different.append("decoupled_weight_decay")
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not any(
        group.get(name) for group in optimizer.param_groups for name in different
    )


def read_config(given: object = None) -> HfDeepSpeedConfig | None:
    """Return the given DeepSpeed configuration (a dictionary, a path or a text), or else the launcher's."""
    if given is None:
        given = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if isinstance(given, HfDeepSpeedConfig):
        return given
    return None if given == "none" else HfDeepSpeedConfig(given)
