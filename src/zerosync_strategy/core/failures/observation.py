"""What a thread is doing, seen from another one or from its error: the line, the module, what it waits for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import Protocol

import torch

from zerosync_strategy.core.comm import waits
from zerosync_strategy.core.failures.flight_recorder import program_line, recorded
from zerosync_strategy.core.failures.state import RankState

_GATHER = "the gather of '"
_NAME = re.compile(r"'([^']+)'")


class Progress(Protocol):
    """How far an engine has come. Read from another thread too."""

    @property
    def steps(self) -> int:
        """Optimizer steps done."""

    @property
    def backwards(self) -> int:
        """Backwards of the window, the running one included."""

    def departure(self, in_forward: bool, in_step: bool) -> str:
        """Return how the engine does otherwise in this window than in the last one; empty if it does not."""

    def name_of(self, module: torch.nn.Module) -> str:
        """Return the name of a module of the engine; empty for others."""


def state_of(
    rank: int,
    activities: Sequence[str],
    frame: FrameType | None,
    progress: Progress | None,
    *,
    failed: bool = False,
    with_recorder: bool = True,
) -> RankState:
    """Return the state of this process.

    Args:
        rank: of this process.
        activities: of its main thread, the innermost last.
        frame: of the main thread, the innermost, or the one that has raised.
        progress: of the engine.
        failed: the main thread has waited, in vain.
        with_recorder: look into torch's flight recorder, which takes some 20 ms.
    """
    gather = next((what for what in activities[::-1] if what.startswith(_GATHER)), "")
    waits_for = gather or waits.describe_wait(frame, failed)
    names = _NAME.findall(waits_for)
    module = names[0].rpartition(".")[0] if gather else ""
    steps, backward, departure = -1, 0, ""
    if progress is not None:
        in_forward = "the forward" in activities
        steps, backward = progress.steps, progress.backwards + in_forward
        departure = progress.departure(in_forward, "the optimizer step" in activities)
        module = module or next(filter(None, map(progress.name_of, _running_modules(frame))), "")
    return RankState(
        rank, activity=activities[-1] if activities else "", waits_for=waits_for, steps=steps, backward=backward,
        parameters=", ".join(names), module=module, line=user_line(frame), departure=departure,
        recorded=recorded() if with_recorder else (),
    )  # fmt: skip


def frame_of(error: BaseException) -> FrameType | None:
    """Return the frame that has raised ``error``."""
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return None if traceback is None else traceback.tb_frame


def user_line(frame: FrameType | None) -> str:
    """Return the :func:`program_line` of a running thread."""
    return program_line((each.f_code.co_filename, each.f_lineno, each.f_code.co_name) for each in _outwards(frame))


def _running_modules(frame: FrameType | None) -> Iterator[torch.nn.Module]:
    """Yield the modules whose forward runs, the innermost first."""
    for each in _outwards(frame):
        if each.f_code.co_name == "_call_impl" and isinstance(module := each.f_locals.get("self"), torch.nn.Module):
            yield module


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
