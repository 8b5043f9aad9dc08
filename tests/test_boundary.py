"""The boundary to DeepSpeed (rule C1), in three laws.

1. No file outside of ``core/engine`` touches an internal of DeepSpeed. ``attached/overrides.py``, which calls the
   attached engine and so lies above, has the methods that it overrides, calls DeepSpeed's own of the same names, and
   touches nothing else.
2. What ``core/engine`` touches is in a table of ``deepspeed_internals.py``.
3. So is every method that is overridden.
"""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import zerosync_strategy
from zerosync_strategy.core.attached import overrides
from zerosync_strategy.core.engine import deepspeed_internals

SOURCE = Path(zerosync_strategy.__file__).parent
ENGINE = SOURCE / "core" / "engine"
OVERRIDES = SOURCE / "core" / "attached" / "overrides.py"
DECLARED = {internal.name for table in deepspeed_internals.EVERY_TABLE for internal in table}
INTERNAL = {internal.name for table in deepspeed_internals.EVERY_TABLE for internal in table if not internal.public}
# Parts of DeepSpeed whose modules are not its interface; zero_to_fp32 is a tool for users.
PRIVATE_MODULES = ("deepspeed.runtime", "deepspeed.compile", "deepspeed.ops", "deepspeed.comm.comm", "deepspeed.utils")
TOOLS = ("deepspeed.utils.zero_to_fp32",)

# What an object of DeepSpeed, by its variable, has that is no internal: torch's own, and what DeepSpeed documents.
OPEN = {
    "engine": {"module", "optimizer", "device", "zero_optimization_stage", *dir(torch.nn.Module)},
    "optimizer": {"module", "param_groups", "zerosync_stock_finalize", "zerosync_stock_norms"},
    "offload": {"module"},
    "param": set(dir(torch.nn.Parameter)),
    "config": {"zero_config"},
}


# ---- 1: outside of core/engine ---------------------------------------------------------------------------------------

# The doctor reads files, in which a key has the name of an internal.
CONFIGURATION_KEYS = {"offload_optimizer"}


def outside() -> Iterator[Path]:
    """Every file but those of the boundary."""
    for path in sorted(SOURCE.rglob("*.py")):
        if ENGINE not in path.parents:
            yield path


def names_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Attributes, methods and texts that are names, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.FunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def imports_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


class OverriddenMethods(ast.NodeTransformer):
    """Leaves methods without their names, and what is called of ``super()``."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.name = "method"
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        return node.value if ast.unparse(node.value) == "super()" else node


def breaches(source: str, may_override: bool = False) -> list[str]:
    tree: ast.AST = ast.parse(source)
    if may_override:
        tree = OverriddenMethods().visit(tree)
    found = [f"{line}: {name}" for line, name in names_in(tree) if name in INTERNAL or name.startswith("ds_")]
    imported = [name for name in imports_in(tree) if name.startswith(PRIVATE_MODULES) and not name.startswith(TOOLS)]
    return found + imported


@pytest.mark.parametrize("path", list(outside()), ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_other_file_touches_an_internal(path: Path) -> None:
    keys = CONFIGURATION_KEYS if path == SOURCE / "tools" / "doctor" / "configurations.py" else set()
    found = breaches(path.read_text(), may_override=path == OVERRIDES)
    assert [each for each in found if each.split(": ")[-1] not in keys] == []


@pytest.mark.parametrize(
    "source",
    [
        "param.ds_shape",
        "getattr(param, 'ds_anything', None)",
        "optimizer.averaged_gradients = {}",
        "def _get_norm_groups(self): ...",
        "from deepspeed.runtime.zero import linear",
        "from deepspeed.comm import comm",
    ],
)
def test_a_breach_is_found(source: str) -> None:
    assert breaches(source)


def test_overrides_may_have_the_methods_that_they_override_and_nothing_else() -> None:
    method = "class A:\n    def _get_norm_groups(self):\n        return super()._get_norm_groups()"
    assert breaches(method) and not breaches(method, may_override=True)
    assert breaches(method + " + self.averaged_gradients", may_override=True)
    assert breaches("self._get_norm_groups()", may_override=True)


# ---- 2 and 3: what is touched or overridden is in a table ------------------------------------------------------------


def test_every_internal_that_is_touched_is_in_a_table() -> None:
    undeclared = []
    for path in sorted(ENGINE.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute) or node.attr in DECLARED:
                continue
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr.startswith("ds_") or (owner in OPEN and node.attr not in OPEN[owner]):
                undeclared.append(f"{path.name}:{node.lineno} {owner}.{node.attr}")
    assert [entry for entry in undeclared if "_zerosync" not in entry] == []


def test_every_method_that_is_overridden_is_in_a_table() -> None:
    for name, cls in vars(overrides).items():
        if name.endswith("Overrides"):
            methods = {method for method in vars(cls) if inspect.isfunction(vars(cls)[method])}
            assert methods - DECLARED - OPEN["optimizer"] - {"forward", "train", "eval"} == set(), name
