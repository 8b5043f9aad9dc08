"""A small training run, by plain DeepSpeed or Lightning, that saves, fails where it is told to, and resumes."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.harness.engines import attached_of, make_engine, rank, start
from tests.harness.oracle import full_parameters
from tests.harness.problem import Data, adamw, loss_of, network
from tests.lightning.runs import Data as LightningData
from tests.lightning.runs import Module, PositionedLoader, Recorder, make_trainer, strategy
from zerosync_strategy import ZeroSync, attach

STEPS, BACKWARDS, SAVE_EVERY = 6, 2, 2
BATCHES = 2 * STEPS * BACKWARDS  # of two ranks: enough for four
FAULT_AT = 4  # optimizer steps done, and saved, before the fault
TIMEOUT = timedelta(seconds=10)
PLACES = ("forward", "backward", "reduction", "step")


class Injected(Exception):
    """What a rank raises where an exception is called for."""


def fault(kind: str, injected_at: Path, disk: Path) -> Callable[[], Any]:
    """What goes wrong, as a function of no arguments. It writes down when. ``disk`` has the checkpoints."""

    def act() -> Any:
        injected_at.write_text(repr(time.monotonic()))
        if kind == "exception":
            raise Injected("out of order")
        if kind == "out of memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (simulated)")
        if kind == "NaN":
            return torch.nan
        if kind == "full disk":
            with suppress(OSError), (disk / "other data").open("wb") as file:
                while True:
                    file.write(bytes(4096))
                    file.flush()
        else:
            os.kill(os.getpid(), signal.SIGKILL if kind == "SIGKILL" else signal.SIGTERM)
        return 1.0

    return act


def arm(zerosync: ZeroSync, net: torch.nn.Module, place: str, act: Callable[[], Any]) -> None:
    """Let the next optimizer step of this rank fail at ``place``."""
    engine = zerosync.engine
    if place == "forward":
        # The first layer has run, and under stage 3 the others are being fetched.
        net[1].register_forward_hook(lambda *_: act() and None)
    elif place in ("backward", "checkpoint"):  # which follows
        net[2].register_forward_hook(lambda *call: call[-1].register_hook(lambda grad: grad * act()) and None)
    elif place == "reduction":
        attached_of(zerosync).parts.reducer.pipeline.launch = lambda bucket: act()  # type: ignore[method-assign]
    else:
        engine.optimizer.optimizer.step = lambda *args, **kwargs: act()


def plain(stage: int, directory: Path, faulty: tuple[str, Callable[[], Any]] | None = None) -> dict[str, torch.Tensor]:
    """From the last checkpoint in ``directory``, if there is one, to the end; the parameters."""
    start(TIMEOUT)
    net = network()
    engine = make_engine(net, adamw(net.parameters()), stage)
    zerosync, data = attach(engine), Data(BATCHES)
    if (directory / "latest").exists():
        engine.load_checkpoint(str(directory))
    for step in range(engine.global_steps, STEPS):
        if faulty and step == FAULT_AT:
            arm(zerosync, net, *faulty)
        for k in range(BACKWARDS):
            engine.backward(loss_of(engine, data.batch(step * BACKWARDS + k, rank())) / BACKWARDS)
        engine.step()
        if engine.global_steps % SAVE_EVERY == 0:
            engine.save_checkpoint(str(directory), tag=f"step{engine.global_steps}")
    return full_parameters(engine.module)


class _Arm(Callback):
    def __init__(self, faulty: tuple[str, Callable[[], Any]]) -> None:
        self.faulty: tuple[str, Callable[[], Any]] | None = faulty

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == FAULT_AT and self.faulty:
            faulty, self.faulty = self.faulty, None
            arm(trainer.strategy.zerosync, pl_module.net, *faulty)


def lightning(
    stage: int, directory: Path, faulty: tuple[str, Callable[[], Any]] | None = None
) -> dict[str, torch.Tensor]:
    """As :func:`plain`, by the Trainer."""
    recorder = Recorder()
    save = ModelCheckpoint(
        dirpath=directory, filename="{step}", every_n_train_steps=SAVE_EVERY, save_top_k=-1, save_last=False
    )
    trainer = make_trainer(
        strategy(stage, timeout=TIMEOUT), [recorder, save, *([_Arm(faulty)] if faulty else [])],
        accumulate_grad_batches=BACKWARDS, enable_checkpointing=True, devices=int(os.environ["WORLD_SIZE"]),
        limit_train_batches=STEPS * BACKWARDS,
    )  # fmt: skip
    saved = sorted(directory.glob("step=*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    loader = PositionedLoader(LightningData(BATCHES))
    trainer.fit(Module(adamw), loader, ckpt_path=saved[-1] if saved else None)
    return recorder.parameters


JOBS = {"plain DeepSpeed": plain, "Lightning": lightning}
