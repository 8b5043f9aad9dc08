"""Every ZeroSync option, once: the strategy, ``attach`` and the ``"zerosync"`` block read :class:`ZeroSyncConfig`."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

AUTO = "auto"
"""The value of an option that is chosen automatically, or left to the launcher, the framework or DeepSpeed."""
_UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**k for k, p in enumerate("KMGT", 1)}} | {
    f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)
}


@dataclasses.dataclass(frozen=True)
class Budget:
    """A budget as a program gave it, in bytes per rank; ``None``: unlimited.

    Attributes:
        device: for full tensors on the device. An automatic budget starts at 0.
        node: for node shards, unless these are within ``device``.
        host: for full tensors in host memory.
        node_in_device: ``device`` covers node shards and full tensors together.
        automatic: ``device`` is chosen automatically.
        limit: bytes that a rank may use in all, for an automatic budget; ``None``: the device's free memory.
        sizes_buckets: what exceeds the budget waits for its reduction in buckets as small as the budget is.
    """

    device: int | None = 0
    node: int | None = 0
    host: int | None = 0
    node_in_device: bool = True
    automatic: bool = False
    limit: int | None = None
    sizes_buckets: bool = True

    @property
    def keeps_any(self) -> bool:
        return self.automatic or any(nbytes != 0 for nbytes in (self.device, self.node, self.host))

    @property
    def keeps_node_shards(self) -> bool:
        """Whether any may be kept in node shards, on several nodes. With all in full, none is left for them."""
        return self.automatic or (self.device not in (0, None) if self.node_in_device else self.node != 0)

    @classmethod
    def read(cls, option: str, given: object, unlimited: str | None, places: Sequence[str]) -> Budget:
        """Return the budget that ``option`` got.

        ``unlimited`` is the option's value for no limit. ``places`` are the keys that a mapping may have in addition to
        ``"device"`` or ``"auto"``.
        """
        if isinstance(given, Mapping):
            return cls._of_places(option, given, places)
        if given is None or isinstance(given, str):
            if given == unlimited:
                return cls(device=None)
            if given == AUTO:
                return cls(automatic=True)
        word = "None" if unlimited is None else f'"{unlimited}"'
        by_place = "".join(f', "{place}": size' for place in places)
        takes = f'or {word}, "auto", {{"auto": size}}, {{"device": size{by_place}}}'
        return cls(device=parse_bytes(option, given, takes))

    @classmethod
    def _of_places(cls, option: str, given: Mapping[str, object], places: Sequence[str]) -> Budget:
        if not given or given.keys() - {"device", *places, AUTO} or {"device", AUTO} <= given.keys():
            *first, last = ("'device' (or 'auto')", *map(repr, places))
            raise ValueError(
                f"ZeroSync option {option!r} takes sizes for {', '.join(first)} and {last}, got {dict(given)!r}."
            )
        sizes: dict[str, Any] = {}
        for where, size in given.items():
            if size == "all" and where != AUTO:
                sizes[where] = None
            else:
                sizes[where] = parse_bytes(f"{option}[{where!r}]", size, "" if where == AUTO else 'or "all"')
        other = next((where for where in places if sizes.get(where, 0) != 0), None)
        if sizes.get("device", 0) is None and other is not None:
            raise ValueError(
                f"ZeroSync option {option!r} got {dict(given)!r}: with all on the device, nothing is left for the"
                f" {other}. Leave {other!r} out."
            )
        limit = sizes.pop(AUTO, None)
        return cls(**sizes, node_in_device="node" not in given, automatic=AUTO in given, limit=limit)


def parse_bytes(option: str, value: object, otherwise: str = "") -> int:
    """Return a size in bytes, from an int or a text as ``"2GiB"`` or ``"500MB"``.

    Raises a ``TypeError`` if ``value`` is neither, and a ``ValueError`` if it is negative or a text that is no size.
    """
    takes = f"ZeroSync option {option!r} takes a number of bytes, a size such as '2GiB' {otherwise}".rstrip()
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(f"{takes}, got {value!r}.")
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", value.strip())
        if match is None or match[2] not in _UNITS:
            raise ValueError(f"{takes}, got {value!r}.")
        return int(Fraction(match[1]) * _UNITS[match[2]])
    if value < 0:
        raise ValueError(f"{takes}, got {value!r}.")
    return value


BLOCK = "zerosync"
"""Name of the optional block in a DeepSpeed configuration that holds these options."""
WHOLE = "whole"
"""The value of ``elementwise_optimizer`` for an optimizer that needs whole parameters."""
_SWITCHES = (
    "coalesce", "overlap_last", "eager_frames", "checkpoint_checksums", "checkpoint_background", "unit_norms",
)  # fmt: skip
_CHOICES = {
    "reduction": ("native", "ordered"),
    "loss_reduction": ("mean", "sum"),
    "checkpoint_format": ("deepspeed", "distributed"),
    "unshard_streams": ("per_group", "own_communicator"),
}


@dataclasses.dataclass(frozen=True)
class ZeroSyncConfig:
    """Options of ZeroSync.

    Args:
        coalesce: ``True``: gradients stay local until the optimizer step and are reduced once (rule W1).
            ``False``: they are reduced after every backward and accumulate in the partition; the result is the same
            up to summation order, with N times the bytes and without the full local gradients in between.
        grad_memory_budget: bytes of unreduced gradients that a rank may hold, as a number or a size such as ``"2GiB"``.
            Gradients that do not fit are reduced during every backward, into this rank's partition. ``None``: no limit;
            ``0``: every gradient is reduced at once. ``"auto"``: the largest budget that fits, chosen while the program
            runs. On the CPU, where free memory says little, ``{"auto": "8GiB"}`` gives the resident memory that each
            rank's process may have.
        param_memory_budget: ZeRO-3 only: bytes of gathered parameters to hold from their first use in a window to the
            optimizer step, instead of gathering them again at every micro-batch. A number of bytes, a size such as
            ``"2GiB"``, or ``"all"``. DeepSpeed's own persistent parameters are always held and do not count.
            ``{"device": "4GiB", "host": "20GiB"}``: parameters that are not held are cached in host memory within
            ``"host"`` (bytes per rank, or ``"all"``), and copied from it instead of gathered again. On several nodes,
            parameters that are not held are kept in node shards, within the same bytes or within ``"node"``, and
            gathered within the node. ``"auto"`` and ``{"auto": "8GiB"}``, also with ``"node"`` and ``"host"``: as for
            the gradients. If both budgets are automatic, one limit is for both together.
        reduction: ``"native"``: sum by the backend's own reduce-scatter. ``"ordered"``: sum in fp32 and in a fixed
            order, bit-identical for all sizes of buckets. Backends without a reduce-scatter, as gloo, always do this.
        loss_reduction: ``"mean"``: losses are means, and the step is that of the mean over ranks. ``"sum"``: losses are
            sums over items, which ``ZeroSync.mean_over()`` counts, and the step is that of the mean over all items.
        overlap_last: reduce during the backward that is known to be the last of its window.
        unshard_streams: ZeRO-3 on a device with streams: ``"per_group"``: parameters are gathered on one stream per
            process group that shards any. ``"own_communicator"``: and on NCCL over a communicator of high priority that
            has no reductions, so that gathers wait for none. It takes NCCL's buffers once more. DeepSpeed's own gathers
            (quantized, on NVMe, hpZ) and those within nodes stay where they are.
        eager_frames: ZeRO-3: a parameter that is read while it is partitioned is unsharded for its reader (rule E1),
            which ``torch.compile`` needs. ``False``: as in DeepSpeed.
        unit_modules: ZeRO-3: names of classes of modules that are gathered as a whole, as ``["LlamaDecoderLayer"]``.
            ``None``: the model's ``_no_split_modules``, or else classes of which a ``ModuleList`` or ``Sequential`` has
            several. A unit has at most half of ``stage3_max_live_parameters``.
        checkpoint_checksums: read all files of a checkpoint to verify them before any is loaded. ``False``: verify only
            what needs no reading: that the save was completed, and that the files belong to it.
        checkpoint_format: how ``save_checkpoint`` writes: ``"deepspeed"``: DeepSpeed's files. ``"distributed"``: those
            of ``torch.distributed.checkpoint``, which FSDP2 and plain torch read, too. Any number of ranks on any
            stage reads both; loading finds the format by itself.
        checkpoint_background: ``save_checkpoint`` returns when values are copied to host memory, and a thread writes
            them. Needs ``checkpoint_format="distributed"``.
        node_size: number of ranks on a node, which have consecutive numbers, and fast links among them. ``"auto"``:
            ``LOCAL_WORLD_SIZE``, or the ranks of one host. Point-to-point exchanges, as with gloo, run in two levels:
            each byte crosses between two nodes once.
        unit_norms: report the norm of the gradients of each layer of a model, or other numbered part, before they are
            clipped: one more sum over the ranks in each step, of 8 bytes a part.
        report_every: log a one-line report on the first rank after every ``report_every`` optimizer steps. ``0``: none.
            The environment variable ``ZEROSYNC_REPORT``, as ``10`` or ``10:steps.log``, overrides it.
        report_file: append these lines to this file instead.
        elementwise_optimizer: ``False``: a trial on small parameters decides. An optimizer that updates each element by
            itself steps ZeRO's flat shards. One that needs whole parameters steps each of them on one rank. Any other
            is an error. ``True``: treat it as the first kind. ``"whole"``: treat it as the second kind.

    Raises:
        TypeError, ValueError: an option has the wrong type or value; the message names the option and what it got.
    """

    coalesce: bool = True
    grad_memory_budget: int | str | Mapping[str, int | str] | None = None
    param_memory_budget: int | str | Mapping[str, int | str] = 0
    reduction: str = "native"
    loss_reduction: str = "mean"
    overlap_last: bool = True
    unshard_streams: str = "per_group"
    eager_frames: bool = True
    unit_modules: Sequence[str] | None = None
    checkpoint_checksums: bool = True
    checkpoint_format: str = "deepspeed"
    checkpoint_background: bool = False
    node_size: int | str = AUTO
    unit_norms: bool = False
    report_every: int = 0
    report_file: str | None = None
    elementwise_optimizer: bool | str = False

    def __post_init__(self) -> None:
        for name in _SWITCHES:
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"ZeroSync option {name!r} takes True or False, got {value!r}.")
        if not isinstance(self.elementwise_optimizer, bool) and self.elementwise_optimizer != WHOLE:
            raise TypeError(
                f"ZeroSync option 'elementwise_optimizer' takes True, False or {WHOLE!r}, got"
                f" {self.elementwise_optimizer!r}."
            )
        names = self.unit_modules
        is_list = isinstance(names, (list, tuple)) and len(names) > 0
        if names is not None and not (is_list and all(isinstance(name, str) and name for name in names)):
            raise TypeError(
                "ZeroSync option 'unit_modules' takes a list of names of classes, as [\"LlamaDecoderLayer\"], got"
                f" {names!r}."
            )
        for name, values in _CHOICES.items():
            if (value := getattr(self, name)) not in values:
                raise ValueError(f"ZeroSync option {name!r} takes {' or '.join(map(repr, values))}, got {value!r}.")
        if self.checkpoint_background and self.checkpoint_format != "distributed":
            raise ValueError(
                "ZeroSync option 'checkpoint_background' got True with checkpoint_format='deepspeed', whose files"
                " DeepSpeed writes. Give checkpoint_format='distributed', too."
            )
        if self.grad_memory_budget is not None and not self.coalesce:
            raise ValueError(
                f"ZeroSync option 'grad_memory_budget' got {self.grad_memory_budget!r} with coalesce=False, where no"
                " gradient stays unreduced. Leave one of them out."
            )
        if isinstance(steps := self.report_every, bool) or not isinstance(steps, int):
            raise TypeError(f"ZeroSync option 'report_every' takes a number of optimizer steps, got {steps!r}.")
        if steps < 0:
            raise ValueError(f"ZeroSync option 'report_every' takes 0 or more steps, got {steps!r}.")
        if not isinstance(self.report_file, (str, type(None))):
            raise TypeError(f"ZeroSync option 'report_file' takes the path of a file, got {self.report_file!r}.")
        if self.report_file is not None and not self.report_every:
            raise ValueError(
                f"ZeroSync option 'report_file' got {self.report_file!r} with report_every=0, which reports no step."
                " Give 'report_every', too."
            )
        if self.node_size != AUTO and (type(self.node_size) is not int or self.node_size < 1):
            raise ValueError(
                f"ZeroSync option 'node_size' takes \"auto\" or a number of ranks, 1 or more, got {self.node_size!r}."
            )
        limits = {self.gradients.limit, self.parameters.limit} - {None}
        if len(limits) > 1:
            raise ValueError(
                "ZeroSync options 'param_memory_budget' and 'grad_memory_budget' got different limits for \"auto\","
                " which is for both together. Give it in one of them."
            )

    @functools.cached_property
    def gradients(self) -> Budget:
        """``grad_memory_budget``, read; without ``coalesce``, 0, and buckets have the size that they have with it."""
        if not self.coalesce:
            return Budget(sizes_buckets=False)
        return Budget.read("grad_memory_budget", self.grad_memory_budget, None, ("node",))

    @functools.cached_property
    def parameters(self) -> Budget:
        """``param_memory_budget``, read."""
        return Budget.read("param_memory_budget", self.param_memory_budget, "all", ("node", "host"))

    @property
    def auto_limit(self) -> int | None:
        """Bytes that a rank may use, for automatic budgets; ``None``: the device's free memory."""
        return self.gradients.limit if self.parameters.limit is None else self.parameters.limit

    def check_block(self, block: Any) -> None:
        """Raise a ``ValueError`` if the ``"zerosync"`` block of a DeepSpeed configuration differs."""
        said = self.resolve(block)
        for name in block or ():
            if said._read(name) != self._read(name):
                raise ValueError(
                    f"ZeroSync option {name!r} is {getattr(said, name)!r} in the {BLOCK!r} block and"
                    f" {getattr(self, name)!r} in config=, which has all options. Give it in one place, or single"
                    " options instead of config=."
                )

    def _read(self, name: str) -> object:
        """Return an option in a comparable form, since it may have several spellings."""
        value = {"grad_memory_budget": self.gradients, "param_memory_budget": self.parameters}.get(name)
        value = getattr(self, name) if value is None else value
        return tuple(value) if isinstance(value, list) else value

    @classmethod
    def option_names(cls) -> frozenset[str]:
        return frozenset(field.name for field in dataclasses.fields(cls))

    @classmethod
    def resolve(cls, block: object = None, keywords: Mapping[str, Any] | None = None) -> ZeroSyncConfig:
        """Merge the ``"zerosync"`` block of a DeepSpeed configuration with arguments.

        Raises:
            TypeError: the block is not a mapping, or an option has the wrong type.
            ValueError: an unknown option, or one given in both places with different values.
        """
        block = {} if block is None else block
        keywords = {} if keywords is None else keywords
        if not isinstance(block, Mapping):
            raise TypeError(f"The {BLOCK!r} block of the DeepSpeed configuration takes a mapping, got {block!r}.")
        for source, options in ((f"the {BLOCK!r} block", block), ("the keyword arguments", keywords)):
            refuse_removed(options)
            for name in options:
                if name not in cls.option_names():
                    raise ValueError(
                        f"Unknown ZeroSync option {name!r} in {source}.{suggest(name, cls.option_names())}"
                    )
        for name in block.keys() & keywords.keys():
            if block[name] != keywords[name]:
                raise ValueError(
                    f"ZeroSync option {name!r} is {block[name]!r} in the {BLOCK!r} block and {keywords[name]!r} as an"
                    " argument. Give it in one place."
                )
        return cls(**{**block, **keywords})


_init = ZeroSyncConfig.__init__


@functools.wraps(_init)  # else readers of signatures, as jsonargparse, would not see the options
def _refusing(self: ZeroSyncConfig, *args: Any, **options: Any) -> None:
    refuse_removed(options)
    _init(self, *args, **options)


ZeroSyncConfig.__init__ = _refusing  # type: ignore[method-assign]


def suggest(name: object, known: frozenset[str]) -> str:
    """Return the end of an error message about the unknown ``name``: the closest known name, or all of them."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(sorted(known))}."


SINCE = "0.4.0"
"""The first release without these. The next major or minor release empties the table."""
REMOVED = {  # each with the remedy
    "overlap_gather": "Leave it out: a step gathers what it has updated while it goes on with the rest.",
    "step_cost": "Leave it out: owners are balanced by what Newton-Schulz costs, the rest by elements.",
    "unshard_streams='shared'": "Leave it out: gathers of different process groups wait for each other no more.",
}


def refuse_removed(options: Mapping[str, object]) -> None:
    """Raise a ``ValueError`` with the remedy if one of ``options``, or its value, was removed."""
    for name, value in options.items():
        for said in (name, f"{name}={value!r}" if isinstance(value, str) else name):
            if said in REMOVED:
                raise ValueError(f"ZeroSync option {said!r} was removed in {SINCE}. {REMOVED[said]}")
