"""Every ZeroSync option, once: the strategy, ``attach`` and the ``"zerosync"`` block all read this class."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

BLOCK = "zerosync"
"""Name of the optional block in a DeepSpeed configuration that holds these options."""


@dataclasses.dataclass(frozen=True)
class ZeroSyncConfig:
    """Options of ZeroSync.

    Args:
        coalesce: ``True``: gradients stay local until the optimizer step and are reduced once (rule W1).
            ``False``: they are reduced after every backward and accumulate in the partition; the result is the same
            up to summation order, with N times the bytes and without the full local gradients in between.

    Raises:
        TypeError: an option has the wrong type; the message names the option, what it got and what it takes.
    """

    coalesce: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.coalesce, bool):
            raise TypeError(f"ZeroSync option 'coalesce' takes True or False, got {self.coalesce!r}.")

    @classmethod
    def option_names(cls) -> frozenset[str]:
        return frozenset(field.name for field in dataclasses.fields(cls))

    @classmethod
    def resolve(cls, block: Any = None, keywords: Mapping[str, Any] | None = None) -> ZeroSyncConfig:
        """Merge the ``"zerosync"`` block of a DeepSpeed configuration with keyword arguments.

        Raises:
            TypeError: the block is not a mapping, or an option has the wrong type.
            ValueError: an unknown option, or one given in both places with different values.
        """
        block = {} if block is None else block
        keywords = {} if keywords is None else keywords
        if not isinstance(block, Mapping):
            raise TypeError(f"The {BLOCK!r} block of the DeepSpeed configuration takes a mapping, got {block!r}.")
        for source, options in ((f"the {BLOCK!r} block", block), ("the keyword arguments", keywords)):
            for name in options:
                if name not in cls.option_names():
                    raise ValueError(
                        f"Unknown ZeroSync option {name!r} in {source}.{suggest(name, cls.option_names())}"
                    )
        for name in block.keys() & keywords.keys():
            if block[name] != keywords[name]:
                raise ValueError(
                    f"ZeroSync option {name!r} is {block[name]!r} in the {BLOCK!r} block and {keywords[name]!r} as a"
                    " keyword argument. Give it in one place."
                )
        return cls(**{**block, **keywords})


def suggest(name: str, known: frozenset[str]) -> str:
    """The end of an error message about the unknown ``name``: the closest known name, or all of them."""
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(sorted(known))}."
