"""The arguments of ``ZeroSyncStrategy`` one by one, for what reads signatures: LightningCLI, help texts, editors."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection
from typing import Any, get_type_hints

from lightning.pytorch.strategies import DeepSpeedStrategy

from zerosync_strategy.core.config import ZeroSyncConfig


def explicit_init(beside_config: Collection[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a strategy's ``__init__(self, stage, *, config, **options)`` the signature that names every option.

    ``None`` stands for an option that is not given: LightningCLI gives all, those at their defaults included, and a
    configuration excludes some and may hold others. Those ``beside_config`` have their own defaults.
    """

    def decorate(init: Callable[..., None]) -> Callable[..., None]:
        keyword = inspect.Parameter.KEYWORD_ONLY
        stock_types = get_type_hints(DeepSpeedStrategy.__init__)
        parameters = {
            "self": inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
            "stage": inspect.Parameter("stage", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None),
            "config": inspect.Parameter("config", keyword, default=None),
        }
        types: dict[str, Any] = {"stage": int | None, "config": dict[str, Any] | str | os.PathLike[str] | None}
        for name, type_ in get_type_hints(ZeroSyncConfig).items():
            parameters[name] = inspect.Parameter(name, keyword, default=None)
            types[name] = type_ | None
        for name, parameter in inspect.signature(DeepSpeedStrategy.__init__).parameters.items():
            if name not in parameters:
                default = parameter.default if name in beside_config else None
                parameters[name] = inspect.Parameter(name, keyword, default=default)
                types[name] = stock_types[name] if name in beside_config else stock_types[name] | None
        init.__annotations__ = {**types, "return": None}
        signature = [p.replace(annotation=types.get(name, p.empty)) for name, p in parameters.items()]
        init.__signature__ = inspect.Signature(signature, return_annotation=None)  # type: ignore[attr-defined]
        return init

    return decorate
