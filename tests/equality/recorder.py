"""What is compared: rows of a training program on one rank. And how one process measures all programs."""

import gc
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Row = tuple[str, str, str]  # the optimizer step, what was measured, its value
Results = dict[str, list[list[Row]]]  # by program and rank

NUMBERS = (
    "backwards", "reductions", "early_reductions", "bytes_sent", "peak_unreduced_bytes", "peak_held_bytes",
    "peak_unsharded_bytes",
)  # fmt: skip
DIGITS = 16  # of a sha256
END, ERROR = "end", "error"
# The methods of a process group that communicate: words that ranks say, and DeepSpeed's own calls, are in no report.
METHODS = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "_allgather_base", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "all_gather_single_coalesced", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base", "gather", "scatter", "send", "recv",
    "recv_anysource", "barrier", "all_gather_single", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "all_to_all_single",  # names since torch 2.13
)  # fmt: skip


class Recorder:
    """The rows of this rank, as its program makes them."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._losses: list[torch.Tensor] = []
        self._recorded: dict[str, int] = {}  # the last optimizer step by engine
        self._calls: list[tuple[str, int]] = []  # of process groups, with their bytes, since the last report
        for name in filter(partial(hasattr, dist.ProcessGroup), METHODS):
            setattr(dist.ProcessGroup, name, self._counted(name, getattr(dist.ProcessGroup, name)))

    def loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as it came, noted."""
        self._losses.append(loss.detach().clone())
        return loss

    def step(self, zerosync: Any, norm: Any = None, engine: str = "") -> None:
        """Note the report of an optimizer step, unless the last call has; a gradient norm is of the coming report."""
        report = zerosync.report
        if report is None or report.step == self._recorded.get(engine):
            return
        self._recorded[engine] = report.step
        found = {name: str(getattr(report, name)) for name in NUMBERS}
        for kind, traffic in sorted(report.collectives.items()):
            found |= {f"{kind} calls": str(traffic.calls), f"{kind} bytes": str(traffic.bytes)}
        if norm is not None:
            found["gradient norm"] = repr(float(norm))
        found |= self._since_last_report()
        self.rows += [(str(report.step), f"{engine} {what}".strip(), value) for what, value in found.items()]

    def end(self, module: torch.nn.Module) -> None:
        """Note the losses since the last report, and every parameter: in full, and its fp32 original. Collective."""
        import deepspeed
        from deepspeed.utils import safe_get_full_fp32_param

        for what, value in self._since_last_report().items():
            self.note(what, value)
        for name, param in module.named_parameters():
            with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
                self.note(name, digest(param))
            if param.dtype != torch.float32:
                self.note(f"{name} in fp32", digest(safe_get_full_fp32_param(param)))

    def note(self, what: str, value: str) -> None:
        """Note something that belongs to no step."""
        self.rows.append((END, what, value))

    def _since_last_report(self) -> dict[str, str]:
        counts: Counter[str] = Counter()
        for name, size in self._calls:
            counts.update({f"group.{name} calls": 1, f"group.{name} bytes": size})
        order = hashlib.sha256(str(self._calls).encode()).hexdigest()[:DIGITS]
        found = {what: str(count) for what, count in sorted(counts.items())}
        found |= {"order of group calls": order, "losses": digest(*self._losses)}
        self._calls, self._losses = [], []
        return found

    def _counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(group: Any, *args: Any, **kwargs: Any) -> Any:
            self._calls.append((name, _bytes(args)))
            return method(group, *args, **kwargs)

        return counted


def _bytes(argument: Any) -> int:
    """Bytes of the tensors in an argument, but for pickled objects: names of classes and files are in them."""
    if isinstance(argument, (list, tuple)):
        return sum(map(_bytes, argument))
    pickled = not isinstance(argument, torch.Tensor) or argument.dtype is torch.uint8
    return 0 if pickled else argument.numel() * argument.element_size()


def digest(*tensors: torch.Tensor) -> str:
    """The first digits of the sha256 of the tensors' bits."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:DIGITS]


def measure(only: str) -> Results:
    """Run every program whose name contains `only`, each in ranks that are forked from this process."""
    import tests.harness.warm  # noqa: F401  # imports once
    from tests.equality.programs import PROGRAMS
    from tests.harness.ranks import RanksError, run_ranks

    def on_rank(name: str) -> list[Row]:
        recorder = Recorder()
        PROGRAMS[name].run(recorder)
        return recorder.rows

    gc.freeze()  # DeepSpeed collects garbage in every engine: not in all that is imported
    results: Results = {}
    for name, program in PROGRAMS.items():
        if only not in name:
            continue
        try:
            results[name] = run_ranks(on_rank, name, world_size=program.ranks)
        except RanksError as error:
            results[name] = [[(END, ERROR, str(error).splitlines()[0])]] * program.ranks
            print(f"\n{name}: {error}", file=sys.stderr)
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results


if __name__ == "__main__":
    source, only, output = Path(sys.argv[1]).resolve(), sys.argv[2], Path(sys.argv[3])
    import zerosync_strategy

    # An installed package must not take the place of the one that is asked for.
    assert Path(zerosync_strategy.__file__).is_relative_to(source), (zerosync_strategy.__file__, source)
    output.write_text(json.dumps(measure(only)))
