"""The keys and values of a DeepSpeed configuration, judged by the configuration classes of the installed DeepSpeed."""

from __future__ import annotations

import difflib
import io
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from typing import Any

from zerosync_strategy.core.options.config import BLOCK
from zerosync_strategy.tools.doctor.findings import Finding, error, warning

TOPIC = "configuration"
_SMALLEST = {"train_micro_batch_size_per_gpu": 1}
_READ_ELSEWHERE = {BLOCK, "sequence_parallel_size"}


class _Asked(dict[str, Any]):
    """A configuration that notes which keys DeepSpeed asks it for."""

    names: typing.ClassVar[set[str]] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)

    def keys(self) -> Any:
        return self  # of which DeepSpeed asks what is in it


def find(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what DeepSpeed would refuse in ``config``, or leave unread.

    Values of ``"auto"`` are left out. Nothing is said where DeepSpeed is not installed.
    """
    try:
        with redirect_stdout(io.StringIO()):  # where DeepSpeed logs, which is for a report here
            from deepspeed import DeepSpeedConfig, __version__

            default = DeepSpeedConfig(_Asked(_SMALLEST))
    except ImportError:
        return
    for name in [name for name in config if name not in _Asked.names | _READ_ELSEWHERE]:
        close = _closest(name, _Asked.names)
        found = f"{name!r} is no key that DeepSpeed {__version__} reads, so it changes nothing.{close}"
        yield (error if close else warning)(TOPIC, found, "Correct it, or leave it out.")
    for name, block in config.items():
        if isinstance(block, Mapping) and name in _Asked.names:
            for path, problem in _refused(DeepSpeedConfig, default, name, block):
                yield error(TOPIC, f"{path!r}: {problem}", f"Correct it; DeepSpeed {__version__} refuses it.")


def _refused(make: Any, default: Any, name: str, block: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what DeepSpeed's class for the block ``name`` refuses, with its path."""
    from pydantic import BaseModel, ValidationError

    try:
        with redirect_stdout(io.StringIO()):
            make({**_SMALLEST, name: _without_autos(block)})
    except ValidationError as problem:
        models = {type(each).__name__: type(each) for each in vars(default).values() if isinstance(each, BaseModel)}
        for each in problem.errors():
            *parents, key = map(str, each["loc"] or ("",))
            path = ".".join(filter(None, (name, *parents, key)))
            if each["type"] == "extra_forbidden":
                yield path, f"unknown key.{_closest(key, _keys(models.get(problem.title), parents))}"
            else:
                yield path, f"{each['msg']}, got {each['input']!r}."
    except Exception:  # of this block alone, as it does not stand: one that needs others, or the number of ranks
        return


def _keys(model: Any, parents: Iterable[str]) -> list[str]:
    """Return the keys that ``model`` takes in the block at the end of ``parents``."""
    for parent in parents:
        fields = getattr(model, "model_fields", {})
        field = next((each for name, each in fields.items() if parent in (name, each.alias)), None)
        kinds = () if field is None else (field.annotation, *typing.get_args(field.annotation))
        model = next((kind for kind in kinds if hasattr(kind, "model_fields")), None)
    return [each.alias or name for name, each in getattr(model, "model_fields", {}).items()]


def _closest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _without_autos(block: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_autos(value) if isinstance(value, Mapping) else value
        for name, value in block.items()
        if value != "auto"
    }
