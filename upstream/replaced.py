"""What each patch would let ZeroSync drop, and the rows of its contract that nothing else uses; ``docs/upstream.md``.

    python upstream/replaced.py

A row goes with a patch if every place in the package that uses its name is in what the patch replaces.
"""

import ast
import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import zerosync_strategy
from zerosync_strategy.core.engine import contract, patches
from zerosync_strategy.core.engine.contract import Internal

SOURCE = Path(zerosync_strategy.__file__).parent
ATTACHED, ENGINE = "core/attached/overrides.py", "core/engine"
_COORDINATOR = f"{ENGINE}/overrides.py:CoordinatorOverrides"

# By patch: file:function, file:Class.method, or file:Class.
REPLACED = {
    "deepspeed-reduction-hook": (
        f"{ATTACHED}:EngineOverrides._backward_prologue",
        f"{ATTACHED}:EngineOverrides.allreduce_gradients",
        f"{ATTACHED}:OptimizerOverrides.finalize_gradient_accumulation_boundary",
        f"{ATTACHED}:OptimizerOverrides.zerosync_stock_finalize",
        f"{ATTACHED}:Stage12Overrides.setup_buckets",
        f"{ATTACHED}:Stage12Overrides.process_gradients",
        f"{ATTACHED}:Stage12Overrides.scaled_global_norm",
        f"{ATTACHED}:Stage3Overrides.reduce_ready_partitions_and_remove_grads",
        f"{ATTACHED}:Stage3Overrides._get_norm_groups",
        f"{ATTACHED}:Stage3Overrides.has_overflow",
        f"{ATTACHED}:WholeStage3Overrides.has_overflow",
        f"{ENGINE}/zero12.py:_GradientShard",
        f"{ENGINE}/zero12.py:give_gradient_shard",
        f"{ENGINE}/zero12.py:gradient_shard",
        f"{ENGINE}/zero12.py:discard_gradient_shard",
        f"{ENGINE}/zero12.py:hand_over_gradients",
        f"{ENGINE}/zero3_optimizer.py:gradient_shards",
        f"{ENGINE}/zero3_optimizer.py:hand_over_gradients",
        f"{ENGINE}/zero3_optimizer.py:give_gradients",
        f"{ENGINE}/zero3_optimizer.py:_joined_shards",
        f"{ENGINE}/zero3_optimizer.py:discard_gradients",
        f"{ENGINE}/zero3_optimizer.py:norm_of_shards",
        f"{ENGINE}/zero3_optimizer.py:overflow_check_on_callers_stream",
    ),
    "deepspeed-gather-hook": (
        f"{ENGINE}/zero12.py:_Elsewhere",
        f"{ENGINE}/zero12.py:parameter_gather",
        f"{ENGINE}/gathering.py:fetch",
        f"{_COORDINATOR}.fetch_sub_module",
        f"{_COORDINATOR}.release_sub_module",
        f"{_COORDINATOR}._invalidate_trace",
        f"{_COORDINATOR}._PartitionedParameterCoordinator__all_gather_params",
        f"{_COORDINATOR}._PartitionedParameterCoordinator__release_param",
    ),
    "deepspeed-step-hook": (
        f"{ATTACHED}:OptimizerOverrides.step",
        f"{ATTACHED}:OptimizerOverrides.zero_grad",
        f"{ATTACHED}:Stage12Overrides.step",
        f"{ATTACHED}:WholeStage12Overrides._optimizer_step",
        f"{ATTACHED}:WholeStage12Overrides._lazy_init_hp_params_optimizer_state",
        f"{ATTACHED}:Stage3Overrides._optimizer_step",
        f"{ATTACHED}:WholeStage3Overrides._optimizer_step",
    ),
    "lightning-accumulation-contract": (
        "lightning/strategy.py:ZeroSyncStrategy.handles_gradient_accumulation",
        "lightning/strategy.py:ZeroSyncStrategy._format_batch_size_and_grad_accum_config",
        "lightning/callbacks.py:SchedulerOverrides.on_train_start",
    ),
    "accelerate-wrapper-hook": (
        "accelerate/wrappers.py:_AcceleratorOverrides.clip_grad_norm_",
        "accelerate/wrappers.py:_AcceleratorOverrides.clip_grad_value_",
        "accelerate/wrappers.py:_OptimizerOverrides.step",
        "accelerate/wrappers.py:_OptimizerOverrides.zero_grad",
    ),
}

FOLDERS = {"DeepSpeed": ("core", "tools"), "Lightning": ("lightning",), "Accelerate": ("accelerate",)}
TABLES = {
    "DeepSpeed": contract.EVERY_TABLE,
    "Lightning": (importlib.import_module("zerosync_strategy.lightning.contract").INTERNALS,),
    "Accelerate": (importlib.import_module("zerosync_strategy.accelerate.contract").INTERNALS,),
}
_NAMES = {  # constants of the contract that hold the name of an internal
    constant: value if isinstance(value, str) else value.name
    for constant, value in vars(contract).items()
    if constant.isupper() and isinstance(value, (str, Internal))
}


def is_table(path: Path) -> bool:
    """Return whether a file declares internals and uses none."""
    return path.name in ("contract.py", "torch_internals.py")


def uses(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield each name of ``tree`` that an object may have, and the function or method it stands in."""

    def walk(node: ast.AST, where: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            where = f"{where}.{node.name}".lstrip(".")
            if isinstance(node, ast.FunctionDef):
                yield node.name, where
        elif isinstance(node, ast.Attribute):
            yield _NAMES.get(node.attr, node.attr), where
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, where
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg, where
        elif isinstance(node, ast.alias):
            yield node.name, where
        elif isinstance(node, ast.Name):
            yield node.id, where
        for child in ast.iter_child_nodes(node):
            yield from walk(child, where)

    yield from walk(tree, "")


def users(project: str) -> dict[str, set[str]]:
    """Return, by name, where the files that know a project use it: file:function."""
    found: dict[str, set[str]] = {}
    for path in sorted(path for folder in FOLDERS[project] for path in (SOURCE / folder).rglob("*.py")):
        if not is_table(path) and path != SOURCE / "core/engine/patches.py":
            for name, where in uses(ast.parse(path.read_text())):
                found.setdefault(name, set()).add(f"{path.relative_to(SOURCE)}:{where}")
    return found


def is_within(place: str, replaced: Iterable[str]) -> bool:
    """Return whether a place is one of those that are replaced, or in one."""
    return any(place == each or place.startswith(f"{each}.") for each in replaced)


def declared() -> set[str]:
    """Return every function, method and class of the package, as ``REPLACED`` names them."""
    places = set()
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                places.add(f"{path.relative_to(SOURCE)}:{node.name}")
            if isinstance(node, ast.ClassDef):
                places |= {
                    f"{path.relative_to(SOURCE)}:{node.name}.{each.name}"
                    for each in node.body
                    if isinstance(each, ast.FunctionDef)
                }
    return places


def rows(project: str) -> list[Internal]:
    """Return the rows of the contract with a project."""
    return list(dict.fromkeys(row for table in TABLES[project] for row in table))


def project_of(patch: str) -> str:
    """Return the project that a patch is for."""
    return next(project for project in TABLES if patch.startswith(project.lower()))


def rows_that_go(names: Iterable[str]) -> list[Internal]:
    """Return the rows that nobody uses once the patches called ``names`` are there."""
    names = list(names)
    replaced = [place for name in names for place in REPLACED[name]]
    (project,) = {project_of(name) for name in names}
    of = users(project)
    return [
        row for row in rows(project) if row.name in of and all(is_within(place, replaced) for place in of[row.name])
    ]


def overrides(names: Iterable[str]) -> list[str]:
    """Return the methods of the project that are overridden now and no more with the patches called ``names``."""
    return [place for name in names for place in REPLACED[name] if "." in place.partition(":")[2]]


def process_patches(gone: Iterable[Internal]) -> list[str]:
    """Return what is replaced in the whole process today, and no more without the rows that are ``gone``."""
    return [f"{patch.owner}.{patch.name}" for patch in patches.EVERY if patch.name in {row.name for row in gone}]


def main() -> None:
    """Print the table of ``docs/upstream.md``, and the rows."""
    for project in TABLES:
        names = [name for name in REPLACED if project_of(name) == project]
        private = [row for row in rows(project) if not row.public]
        print(f"{project}: {len(rows(project))} rows, {len(private)} of them private")
        for group in [*([name] for name in names), *([names] if len(names) > 1 else [])]:
            gone = rows_that_go(group)
            shown = ", ".join(f"{row.owner}.{row.name}" for row in gone)
            print(
                f"  {' + '.join(group)}: {len(gone)} rows, {sum(not row.public for row in gone)} private,"
                f" {len(overrides(group))} overrides, process-wide {process_patches(gone)}\n    {shown}"
            )


if __name__ == "__main__":
    main()
