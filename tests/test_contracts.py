"""The tables of internals (rule C1): each row, with its internal taken away, is an error that names it."""

import ast
import inspect
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import zerosync_strategy
from tests.harness.copying import make_engine
from tests.harness.ranks import run_ranks
from zerosync_strategy import ContractError, attach
from zerosync_strategy.accelerate.contract import TRAINER
from zerosync_strategy.core.engine import (
    compat,
    compilation,
    contract,
    deepspeed_internals,
    engine_state,
    several,
    torch_internals,
    transformers,
    zero,
    zero3,
)
from zerosync_strategy.core.engine.contract import LIBRARIES, Internal
from zerosync_strategy.core.engine.zero import internals_of
from zerosync_strategy.tools.plan import replay
from zerosync_strategy.tools.plan.jobs import Cluster

SOURCE = Path(zerosync_strategy.__file__).parent
LAYERS = {
    "lightning": "ZeroSyncStrategy", "pytorch_lightning": "ZeroSyncStrategy", "fabric": "ZeroSyncFabricStrategy",
    "lightning_fabric": "ZeroSyncFabricStrategy", "accelerate": "ZeroSyncPlugin",
}  # fmt: skip


def table_of(layer: str) -> tuple[Internal, ...]:
    table: tuple[Internal, ...] = import_module(f"zerosync_strategy.{layer}.contract").INTERNALS
    return table


def make(layer: str) -> Any:
    return getattr(import_module(f"zerosync_strategy.{layer}"), LAYERS[layer])(stage=2)


@contextmanager
def without(internal: Internal, owner: Any = None) -> Iterator[None]:
    """The library as if it had renamed what `internal` names, on `owner` or where the row says."""
    with pytest.MonkeyPatch.context() as patch:
        if internal.named_in:
            stock = contract.names_in
            renamed = lambda module: stock(module) - ({internal.name} if module == internal.named_in else set())  # noqa: E731
            patch.setattr(contract, "names_in", renamed)
        else:
            owner = contract.resolve(internal.owner) if owner is None else owner
            mro = owner.__mro__ if inspect.isclass(owner) else (owner, *type(owner).__mro__)
            try:
                for holder in mro:
                    if internal.name in vars(holder):
                        patch.delattr(holder, internal.name)
            except TypeError:  # a type of C++
                others = {name: None for name in dir(owner) if not name.startswith("__") and name != internal.name}
                stand_in = type(owner.__name__, (), others)
                resolve = contract.resolve
                patch.setattr(contract, "resolve", lambda path: stand_in if path == internal.owner else resolve(path))
        yield


def asked_for(table: tuple[Internal, ...]) -> list[Internal]:
    rows = [row for row in table if not row.optional and row.applies_to(contract.release_of(row.package))]
    assert rows
    return rows


def check_refused(internal: Internal, build: Callable[[], Any], owner: Any = None) -> None:
    with without(internal, owner), pytest.raises(ContractError) as error:
        build()
    text, library = str(error.value), LIBRARIES[internal.package]
    assert f".{internal.name} is " in text  # of this owner, or of a row before that has it from the same base
    assert f"Found {library.name} {contract.release_of(internal.package)}" in text and library.newest in text


@pytest.mark.parametrize("layer", LAYERS)
def test_a_framework_that_lacks_an_internal_is_refused_by_name(layer: str) -> None:
    make(layer)
    for row in asked_for(table_of(layer)):
        check_refused(row, lambda: make(layer))


def test_a_framework_that_calls_a_method_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.strategies import DeepSpeedStrategy

    monkeypatch.setattr(DeepSpeedStrategy, "_setup_model_and_optimizer", lambda self, optimizer, model: None)
    with pytest.raises(ContractError, match=r"takes \('optimizer', 'model'\), expected \('model', 'optimizer', 'lr_s"):
        make("lightning")


# What verifies a table, by table, where it is not attach().
FEATURES: dict[int, list[tuple[tuple[Internal, ...], Callable[[Any], Any]]]] = {
    2: [
        (deepspeed_internals.ACCUMULATION, zero.accumulate_outside),
        (deepspeed_internals.DEEPCOMPILE, lambda _: compilation.deepcompile_last_pass(print).__enter__()),
        (deepspeed_internals.ANY_MODEL, lambda _: compat.allow_any_model()),
        (torch_internals.PLAN, lambda _: replay._join(Cluster(2))),
        (TRAINER, lambda _: make("accelerate").set_deepspeed_weakref()),
        (transformers.INTERNALS, lambda _: transformers.nothing_is_sharded().__enter__()),
    ],
    3: [
        (deepspeed_internals.UNSHARD_ON_READ, attach),
        (torch_internals.COMPILATION, attach),
        (deepspeed_internals.SEVERAL_ENGINES, lambda engine: several.restrict(engine, engine.module, engine)),
        (deepspeed_internals.NESTED_ZERO_INIT, lambda _: zero3.wrap_zero_init(print)),
        (deepspeed_internals.EVALUATION, lambda engine: engine_state.loading_without_optimizer(engine).__enter__()),
    ],
}


@pytest.mark.parametrize("stage", [2, 3])
def test_an_engine_that_lacks_an_internal_is_refused_by_name(stage: int) -> None:
    def run() -> None:
        engine = make_engine(stage, {"offload_optimizer": {"device": "cpu"}})
        of_attach = (*torch_internals.TRAINING, *deepspeed_internals.CONFIGURATION, *internals_of(engine))
        for table, verify in [(of_attach, attach), *FEATURES[stage]]:
            for row in asked_for(table):
                is_live = not row.named_in and row.package == "deepspeed" and not row.owner.startswith("deepspeed.")
                owner = contract._LIVE[row.owner](engine) if is_live else None
                check_refused(row, lambda verify=verify: verify(engine), owner)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.optimizer, "zero_grad", lambda keep: None, raising=False)
            with pytest.raises(ContractError, match=r"zero_grad takes \('keep',\), expected \('set_to_none',\)"):
                attach(engine)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            attach(engine)  # nothing of the failed attempts is left behind

    run_ranks(run, world_size=1)


def test_every_table_is_taken_away_row_by_row() -> None:
    of_engines = (
        deepspeed_internals.CONFIGURATION,
        deepspeed_internals.ALL_STAGES,
        deepspeed_internals.REFUSED,
        torch_internals.TRAINING,
    )
    of_stages = (
        deepspeed_internals.STAGE_1_2,
        deepspeed_internals.STAGE_3,
    )
    taken = {*itertools.chain(*of_engines, *of_stages), *(row for of in FEATURES.values() for t, _ in of for row in t)}
    assert {row for table in (*deepspeed_internals.EVERY_TABLE, *torch_internals.EVERY_TABLE) for row in table} <= taken


# ---- what is used is in a table --------------------------------------------------------------------------------------

EVERY_ROW = [
    row
    for table in (
        *deepspeed_internals.EVERY_TABLE,
        *torch_internals.EVERY_TABLE,
        transformers.INTERNALS,
        TRAINER,
        *map(table_of, LAYERS),
    )
    for row in table
]  # fmt: skip
DECLARED = {row.name for row in EVERY_ROW}
STANDARD = {"_current_frames", "_getframe", "_name_"}  # of Python's library
TREES = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def is_private(name: str) -> bool:
    return bool(re.fullmatch(r"_(?!_|zerosync)\w*(?<!__)", name)) and name not in STANDARD


def defined_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            yield node.attr


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


OURS = {name for tree in TREES.values() for name in defined_in(tree)}


def private_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Private names that the package does not define: as attributes, as texts, and in imports."""
    listed = {
        id(each) for node in ast.walk(tree) if isinstance(node, (ast.Set, ast.Tuple, ast.List)) for each in node.elts
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if node.attr not in OURS:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in listed:
            if is_private(node.value) and node.value.isidentifier() and node.value not in OURS:
                yield node.lineno, node.value
        elif isinstance(node, ast.ImportFrom) and not node.level:
            is_hidden = any(map(is_private, (node.module or "").split(".")))
            for alias in node.names:
                if (is_hidden or is_private(alias.name)) and not (node.module or "").startswith("zerosync_strategy"):
                    yield node.lineno, alias.name


@pytest.mark.parametrize("path", list(TREES), ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_private_name_of_a_library_is_in_a_table(path: Path) -> None:
    parts = {part for row in EVERY_ROW for part in (*row.owner.split("."), *row.named_in.split("."))}
    assert [use for use in private_uses(TREES[path]) if use[1] not in DECLARED | parts] == []


@pytest.mark.parametrize(
    "source",
    [
        "engine._something_of_theirs()",
        "getattr(trainer, '_something_of_theirs', None)",
        "from torch._somewhere import anything",
        "from torch.somewhere import _anything",
        "class A(B):\n    def _format(self):\n        super()._something_of_theirs()",
    ],
)
def test_a_private_use_is_found(source: str) -> None:
    assert {name for _, name in private_uses(ast.parse(source))} - DECLARED


def classes_on_frameworks() -> Iterator[type]:
    """The package's classes with a base of a framework."""
    for layer in LAYERS:
        package = import_module(f"zerosync_strategy.{layer}")
        for file in sorted(
            {path.stem for folder in package.__path__ for path in Path(folder).glob("*.py")} - {"__init__", "run"}
        ):
            module = import_module(f"zerosync_strategy.{layer}.{file}")
            for value in vars(module).values():
                if inspect.isclass(value) and value.__module__ == module.__name__ and foreign_bases(value):
                    yield value


def foreign_bases(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if base.__module__.split(".")[0] in LIBRARIES.keys() - {"torch"}]


def test_every_overridden_method_and_private_attribute_of_a_base_is_in_a_table() -> None:
    """Whatever a base has too: the framework may call or read it."""
    found, undeclared = set(), []
    for cls in classes_on_frameworks():
        bases = foreign_bases(cls)
        words = frozenset.union(*(contract.names_in(base.__module__) for base in bases))
        (tree,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls))).body
        on_self = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_self(node.value)}
        shared = {name for name in on_self if is_private(name) and name in words and not name.startswith("_abc")}
        shared |= {name for name in vars(cls) if any(name in vars(base) for base in bases) and is_method(cls, name)}
        found |= shared
        undeclared += [f"{cls.__name__}.{name}" for name in sorted(shared - DECLARED)]
    assert undeclared == [] and len(found) > 40


def is_method(cls: type, name: str) -> bool:
    special = name.startswith("__") and name != "__post_init__"
    return not special and isinstance(vars(cls)[name], (property, staticmethod, type(is_private)))


def test_every_method_that_is_interposed_on_a_framework_is_in_a_table() -> None:
    layers = [
        value
        for layer in LAYERS
        for file in ("callbacks", "wrappers", "strategy")
        if (SOURCE / layer / f"{file}.py").exists()
        for name, value in vars(import_module(f"zerosync_strategy.{layer}.{file}")).items()
        if name.endswith("Overrides") and value.__module__.startswith("zerosync_strategy")
    ]
    methods = {name for cls in layers for name, value in vars(cls).items() if is_method(cls, name)}
    own = {"load_deepspeed"}  # of no framework
    assert methods - DECLARED - own - {"load_state_dict", "training", "train", "eval"} == set() and len(methods) > 12
