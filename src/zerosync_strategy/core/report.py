"""The report of one optimizer step, and the automatic budgets in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from zerosync_strategy.core.comm.journal import Traffic
from zerosync_strategy.version import __version__


@dataclass(frozen=True)
class Choice:
    """The chosen budgets in bytes, and the reasons. ``None``: that budget is not automatic.

    Attributes:
        limit: what a rank may use, on the rank with the smallest limit.
        room: what the budgets and everything else leave of the limit, on the rank with the least.
        parameters: of held parameters, node shards included.
        gradients: of gradients that stay unreduced.
        used_otherwise: the peak of everything else, on the rank that used most.
        reserve: what is left free.
    """

    limit: int
    room: int
    parameters: int | None
    gradients: int | None
    used_otherwise: int
    reserve: int

    def __str__(self) -> str:
        given = {"parameters": self.parameters, "gradients": self.gradients}
        held = " and ".join(f"{nbytes} bytes of {what}" for what, nbytes in given.items() if nbytes is not None)
        return (
            f"holds {held}: of a limit of {self.limit} bytes everything else has used {self.used_otherwise},"
            f" {self.reserve} are in reserve, and the rank with the least has {self.room} left"
        )


@dataclass(frozen=True)
class StepReport:
    """One optimizer step, with the forwards and backwards since the step before.

    Attributes:
        step: number of the optimizer step of this engine since attach, from 1.
        backwards: backwards since the last step whose gradients no ``zero_grad()`` has dropped.
        reductions: passes over the gradients that sent some of them; 1 when coalesced (W1).
        early_reductions: reductions that ran during a backward.
        floor_bytes: the minimum that the step has to send with the options in force: each gradient once per reduction
            pass, and each parameter once. Under ZeRO-3, a parameter that is neither held nor cached on the host counts
            each time that a module needs it after the options in force have let it be released; DeepSpeed's limits are
            among them, as ``stage3_max_reuse_distance``.
        floor_bytes_between_nodes: the part of ``floor_bytes`` that is sent to other nodes, each byte once per node.
        peak_unreduced_bytes: peak of local gradients.
        peak_held_bytes: ZeRO-3: peak of gathered parameters held over the window.
        peak_node_bytes: ZeRO-3: peak of node shards of parameters on this rank.
        peak_host_bytes: ZeRO-3: peak of parameters cached in host memory.
        loaded_bytes: ZeRO-3: copied from host memory instead of gathered.
        copied_bytes: host memory with copies of what a checkpoint in the background has, kept for the next one.
        peak_unsharded_bytes: ZeRO-3: peak of gathered parameters (E1), including gathers in flight and parameters held
            or kept for a backward; without persistent ones and those of a ``GatheredParameters`` context.
        seconds: host time in ZeroSync's own reduction, including waits for other ranks.
        collectives: calls and bytes sent by this rank for this engine, by DeepSpeed's name of the collective; without
            what DeepSpeed and the program send themselves. Of several engines of one module, gathers count for the one
            whose forward, backward or step has begun last.
        apart: bytes sent by this rank since the step before that are not for a step, by purpose: checkpoints, full
            parameters, weights or gradients, forwards without gradients, ``GatheredParameters`` contexts. No other
            number includes them.
        unit_norms: with the option of this name, the norm of the averaged gradients of each part of the model, by name,
            without the loss scale, before the program changes or clips them.
        budgets: with ``"auto"``, the budgets chosen for the step and the reasons; otherwise, and while measuring,
            ``None``.
        version: of ZeroSync.
    """

    step: int
    backwards: int
    reductions: int
    early_reductions: int
    floor_bytes: int
    peak_unreduced_bytes: int
    peak_held_bytes: int
    peak_host_bytes: int
    loaded_bytes: int
    peak_unsharded_bytes: int
    seconds: float
    collectives: Mapping[str, Traffic]
    budgets: Choice | None = None
    floor_bytes_between_nodes: int = 0
    peak_node_bytes: int = 0
    copied_bytes: int = 0
    apart: Mapping[str, int] = field(default_factory=dict)
    unit_norms: Mapping[str, float] = field(default_factory=dict)
    version: str = __version__

    @property
    def bytes_sent_between_nodes(self) -> int:
        """The part of :attr:`bytes_sent` sent to other nodes; of the backend's own collectives, the least possible."""
        return sum(traffic.between for traffic in self.collectives.values())

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent for the step, all collectives together."""
        return sum(traffic.bytes for traffic in self.collectives.values())

    @property
    def ratio(self) -> float:
        """Bytes sent divided by :attr:`floor_bytes`; 1.0 on a single rank, where nothing is sent."""
        return self.bytes_sent / self.floor_bytes if self.floor_bytes else 1.0

    def numbers(self) -> dict[str, float]:
        """Return the numbers by name for a logger, with calls and bytes of each collective and norms of units."""
        own = [each.name for each in fields(self) if each.type in ("int", "float") and each.name != "step"]
        names = [*own, "bytes_sent", "bytes_sent_between_nodes", "ratio"]
        numbers = {name: float(getattr(self, name)) for name in names}
        for kind, traffic in self.collectives.items():
            numbers |= {f"{kind}/calls": float(traffic.calls), f"{kind}/bytes": float(traffic.bytes)}
        return numbers | {f"norm/{unit}": norm for unit, norm in self.unit_norms.items()}

    def _between(self) -> list[str]:
        floor = self.floor_bytes_between_nodes
        if not floor:
            return []
        sent = self.bytes_sent_between_nodes
        return [f"between nodes: {size_text(sent)} of them, {sent / floor:.3f} x the minimum of {size_text(floor)}"]

    def _passes(self) -> str:
        return f"{count_text(self.backwards, 'backward')}, {count_text(self.reductions, 'reduction')}"

    def _beside(self) -> str:
        return ", ".join(f"{size_text(nbytes)} for {what}" for what, nbytes in self.apart.items())

    def line(self, engine: str = "") -> str:
        """Return one line: the step, its backwards and reductions, bytes against the minimum, and peaks of memory.

        It begins with the name of the ``engine``, if given.
        """
        peaks = {"unreduced gradients": self.peak_unreduced_bytes, "gathered parameters": self.peak_unsharded_bytes}
        memory = "".join(f"; up to {size_text(nbytes)} of {what}" for what, nbytes in peaks.items() if nbytes)
        beside = f"; beside it {self._beside()}" if self.apart else ""
        return (
            f"{engine and f'{engine}: '}step {self.step}: {self._passes()};"
            f" sent {size_text(self.bytes_sent)}, {self.ratio:.3f} x the minimum{beside}{memory}"
        )

    def __str__(self) -> str:
        """Return four lines: backwards and reductions, collectives, bytes against the minimum, memory.

        Further lines: bytes between nodes, bytes that were not for the step, and automatic budgets, if any.
        Sizes are decimal: 1 MB is 1,000,000 bytes.
        """
        early = f" ({self.early_reductions} during a backward)" if self.early_reductions else ""
        kinds = [f"{each.calls} {kind} of {size_text(each.bytes)}" for kind, each in self.collectives.items()]
        peaks = {
            "unreduced gradients": self.peak_unreduced_bytes,
            "gathered parameters": self.peak_unsharded_bytes,
            "parameters held until the step": self.peak_held_bytes,
            "parameters in node shards": self.peak_node_bytes,
            "parameters in host memory": self.peak_host_bytes,
            "copies for checkpoints in host memory": self.copied_bytes,
        }
        memory = [f"{size_text(nbytes)} of {what}" for what, nbytes in peaks.items() if nbytes]
        loaded = f"; {size_text(self.loaded_bytes)} loaded from host memory" if self.loaded_bytes else ""
        lines = [
            f"step {self.step}: {self._passes()}{early};"
            f" {1e3 * self.seconds:.3g} ms of host time in reductions, waiting included",
            f"collectives: {', '.join(kinds) or 'none'}",
            f"bytes: {size_text(self.bytes_sent)} sent by this rank, {self.ratio:.3f} x the minimum of"
            f" {size_text(self.floor_bytes)} for these options",
            *self._between(),
            *([f"beside the step: {self._beside()}"] if self.apart else []),
            f"memory peaks: {', '.join(memory) or 'none'}{loaded}",
        ]
        return "\n".join(lines if self.budgets is None else [*lines, f"budgets: {self.budgets}"])


def count_text(number: int, what: str) -> str:
    """Return ``number`` and the noun ``what``, in the plural if needed."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def size_text(nbytes: int) -> str:
    """Return bytes in decimal units, as 27.1 MB."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= factor:
            return f"{nbytes / factor:.4g} {unit}"
    return f"{nbytes} B"
