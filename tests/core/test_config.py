import inspect
import math
import re
from typing import Any

import pytest
import torch

from zerosync_strategy import ZeroSyncConfig


def test_defaults_and_merging() -> None:
    assert ZeroSyncConfig.resolve() == ZeroSyncConfig(coalesce=True, param_memory_budget=0, reduction="native")
    assert ZeroSyncConfig.resolve({"coalesce": False}) == ZeroSyncConfig(coalesce=False)
    assert ZeroSyncConfig.resolve({"coalesce": False}, {"coalesce": False}) == ZeroSyncConfig(coalesce=False)


def test_a_block_beside_a_config_says_the_same_or_is_an_error() -> None:
    config = ZeroSyncConfig(grad_memory_budget=2**30, unit_modules=("Linear",))
    config.check_block({"grad_memory_budget": "1GiB", "unit_modules": ["Linear"], "coalesce": True})
    with pytest.raises(ValueError, match="'coalesce' is False in the 'zerosync' block and True in config="):
        config.check_block({"coalesce": False})


def test_programs_find_the_options_in_the_signature() -> None:
    names = set(inspect.signature(ZeroSyncConfig).parameters)
    assert names == ZeroSyncConfig.option_names()


@pytest.mark.parametrize("value", [1, 0, "True", None])
def test_wrong_type(value: object) -> None:
    with pytest.raises(TypeError, match=f"'coalesce' takes True or False, got {value!r}"):
        ZeroSyncConfig(coalesce=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("block", "keywords", "error", "message"),
    [
        ({"coalesc": True}, {}, ValueError, "'coalesc' in the 'zerosync' block. Did you mean 'coalesce'?"),
        (
            {},
            {"xyz": True},
            ValueError,
            "'xyz' in the keyword arguments. Known: checkpoint_background,",
        ),
        ({"coalesce": True}, {"coalesce": False}, ValueError, "Give it in one place"),
        (["coalesce"], {}, TypeError, "takes a mapping"),
        ({1: 2}, {}, ValueError, "Unknown ZeroSync option 1 in the 'zerosync' block. Known: .*coalesce, "),
    ],
)
def test_wrong_options(block: object, keywords: dict[str, bool], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message.replace("?", r"\?")):
        ZeroSyncConfig.resolve(block, keywords)


def test_values_that_contradict() -> None:
    with pytest.raises(ValueError, match="'reduction' takes 'native' or 'ordered', got 'sorted'"):
        ZeroSyncConfig(reduction="sorted")
    with pytest.raises(ValueError, match="'unshard_streams' takes 'per_group' or 'own_communicator', got 'one'"):
        ZeroSyncConfig(unshard_streams="one")
    with pytest.raises(ValueError, match="'grad_memory_budget' got 0 with coalesce=False"):
        ZeroSyncConfig(coalesce=False, grad_memory_budget=0)
    with pytest.raises(ValueError, match=r"'grad_memory_budget' takes .* or None, .*, got '1XB'"):
        ZeroSyncConfig(grad_memory_budget="1XB")
    assert ZeroSyncConfig(grad_memory_budget="1KB").gradients.device == 1000
    with pytest.raises(ValueError, match=r"'grad_memory_budget' takes sizes for 'device' .* got {'host': 1}"):
        ZeroSyncConfig(grad_memory_budget={"host": 1})
    with pytest.raises(ValueError, match=r"\"grad_memory_budget\['node'\]\" takes .* got '1XB'"):
        ZeroSyncConfig(grad_memory_budget={"node": "1XB"})


@pytest.mark.parametrize(
    ("options", "keeps"),
    [
        ({}, False), ({"coalesce": False}, False),
        ({"grad_memory_budget": 0}, False), ({"grad_memory_budget": 9}, True),
        ({"grad_memory_budget": {"node": "all"}}, True), ({"grad_memory_budget": {"device": 9, "node": 0}}, False),
        ({"grad_memory_budget": {"device": "all"}}, False), ({"grad_memory_budget": "auto"}, True),
    ],
)  # fmt: skip
def test_what_may_be_in_node_shards(options: dict[str, Any], keeps: bool) -> None:
    assert ZeroSyncConfig(**options).gradients.keeps_node_shards == keeps


@pytest.mark.parametrize("given", [0, -1, True, "two", 1.5])
def test_a_node_size_that_is_none(given: Any) -> None:
    with pytest.raises(ValueError, match="'node_size' takes \"auto\" or a number of ranks"):
        ZeroSyncConfig(node_size=given)


@pytest.mark.parametrize(
    ("given", "device", "node"),
    [(None, None, 0), ("2KB", 2000, 0), ({"device": "1KiB", "node": 5}, 1024, 5), ({"node": "all"}, 0, None)],
)
def test_sizes_of_gradients_by_level(given: Any, device: int | None, node: int | None) -> None:
    config = ZeroSyncConfig(grad_memory_budget=given)
    assert (config.gradients.device, config.gradients.node) == (device, node)
    assert config.gradients.node_in_device == (not isinstance(given, dict))


@pytest.mark.parametrize(
    ("given", "size"),
    [(0, 0), (5, 5), ("7", 7), ("2KB", 2000), ("1.5 MiB", 1536 * 1024), ("3GiB", 3 * 2**30), ("all", None)],
)
def test_sizes(given: int | str, size: int | None) -> None:
    assert ZeroSyncConfig(param_memory_budget=given).parameters.device == size


@pytest.mark.parametrize(
    ("given", "device", "host"),
    [
        ("2KB", 2000, 0),
        ({"device": "1KiB", "host": "all"}, 1024, None),
        ({"host": 5}, 0, 5),
        ({"device": "all"}, None, 0),
    ],
)
def test_sizes_by_place(given: Any, device: int | None, host: int | None) -> None:
    config = ZeroSyncConfig(param_memory_budget=given)
    assert (config.parameters.device, config.parameters.host) == (device, host)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "takes sizes for 'device' .* and 'host', got {}"),
        ({"gpu": 1}, "takes sizes for 'device' .* and 'host', got {'gpu': 1}"),
        ({"host": -1}, r"param_memory_budget\['host'\]. takes a number of bytes, .*, got -1"),
        ({"device": "all", "host": 1}, "nothing is left for the host. Leave 'host' out"),
    ],
)
def test_wrong_sizes_by_place(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ZeroSyncConfig(param_memory_budget=given)


@pytest.mark.parametrize(
    ("given", "error"), [(-1, ValueError), ("2 XB", ValueError), ("x", ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_wrong_sizes(given: object, error: type[Exception]) -> None:
    with pytest.raises(
        error, match=r"'param_memory_budget' takes a number of bytes, .* or \"all\", \"auto\", {.*}, got"
    ):
        ZeroSyncConfig(param_memory_budget=given)  # type: ignore[arg-type]


NONSENSE: list[Any] = [
    (), [], {}, {1: 2}, {"auto": None}, {"auto": "all"}, {"auto": -1}, {"device": 1, "auto": 2}, {"host": math.nan},
    object(), -1, 1.5, math.nan, math.inf, b"1GB", "", "-1", "nan", "1e9", "1 GB/s", "None", "True",
    torch.tensor([1, 2]), len, 1j,
]  # fmt: skip


@pytest.mark.parametrize("option", sorted(ZeroSyncConfig.option_names()))
def test_nonsense_is_an_error_that_names_the_option(option: str) -> None:
    """Of every option, also of those to come: True for a number and a number for True are other tests."""
    for value in NONSENSE:
        with pytest.raises((TypeError, ValueError), match=f"ZeroSync option .{option}") as raised:
            ZeroSyncConfig(**{option: value})
        assert re.search(r"got |takes ", str(raised.value)), raised.value


@pytest.mark.parametrize("given", [{"device": 1, "auto": 2}, {"auto": 1, "host": 2}, {}])
def test_a_budget_of_gradients_has_other_places(given: Any) -> None:
    with pytest.raises(ValueError, match=r"'grad_memory_budget' takes sizes for 'device' .* and 'node', got {"):
        ZeroSyncConfig(grad_memory_budget=given)


@pytest.mark.parametrize(("given", "error"), [(True, TypeError), ("2", TypeError), (1.0, TypeError), (-1, ValueError)])
def test_wrong_numbers_of_steps(given: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"'report_every' takes .* steps, got {given!r}"):
        ZeroSyncConfig(report_every=given)  # type: ignore[arg-type]
