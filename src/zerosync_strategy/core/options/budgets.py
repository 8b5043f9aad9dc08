"""Budgets of memory, for unreduced gradients and gathered parameters: where they may stay, and in how many bytes."""

from __future__ import annotations

import dataclasses
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
    def read(cls, option: str, given: Any, unlimited: str | None, places: Sequence[str]) -> Budget:
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
    def _of_places(cls, option: str, given: Mapping[Any, Any], places: Sequence[str]) -> Budget:
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


def parse_bytes(option: str, value: Any, otherwise: str = "") -> int:
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
