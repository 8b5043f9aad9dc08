"""After the last engine is detached, nothing of any library or of the process is replaced any more (rule C2)."""

import ast
import gc
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero import parameter_offload
from deepspeed.utils import set_z3_leaf_module
from torch.optim.swa_utils import AveragedModel

import zerosync_strategy
from tests.harness import engines as harness
from tests.harness.copying import adamw, loss_of, make_engine, network
from tests.harness.engines import rank
from tests.harness.ranks import run_ranks
from tests.harness.replaced import LIBRARIES, differences, snapshot
from zerosync_strategy import attach, prepare_cpu, shard_over
from zerosync_strategy.core.engine import patches


def train(engine: Any, steps: int = 2) -> None:
    for k in range(steps):
        engine.backward(loss_of(engine, k, rank()))
        engine.step()


@pytest.mark.extended(but=("3-detach",))
@pytest.mark.parametrize(("stage", "end"), [(2, "destroy"), (3, "detach")])
@pytest.mark.off_device("the simulation has replaced much before")
def test_nothing_stays_replaced(stage: int, end: str) -> None:
    def run() -> tuple[list[str], list[str], list[str]]:
        before = snapshot()
        prepare_cpu()
        module = network()
        set_z3_leaf_module(module[0], True)
        engines = harness.make_engine(module, adamw(module), stage), make_engine(stage)
        shard_over(torch.distributed.group.WORLD, torch.nn.Linear(2, 2))
        stock = gradient_hooks(module)
        handles = [attach(engine) for engine in engines]
        assert all(set(now).isdisjoint(before) for now, before in zip(gradient_hooks(module), stock, strict=True))
        for engine in engines:
            train(engine)
        average = AveragedModel(torch.nn.Linear(2, 2))
        handles[0].detach() if end == "detach" else engines[0].destroy()
        assert gradient_hooks(module) == (stock if end == "detach" else [[]] * len(stock))
        between = differences(before, snapshot())
        handles[1].detach() if end == "detach" else engines[1].destroy()
        after = differences(before, snapshot())
        engines[1].destroy()
        torch.distributed.destroy_process_group()
        average.update_parameters(torch.nn.Linear(2, 2))
        return between, after, [f"{patch.owner}.{patch.name}" for patch in patches.EVERY]

    (result,) = run_ranks(run, world_size=1)
    between, after, listed = result
    # ZeRO-3's own, as long as the process lives.
    of_zero3 = {"torch.nn.functional.linear", "torch.nn.functional.linear.__code__"}
    assert set(after) <= of_zero3
    unlisted = [name for name in between if not any(is_same(name, patch) for patch in listed)]
    assert set(unlisted) <= of_zero3 and len(between) > 12


def gradient_hooks(module: torch.nn.Module) -> list[list[Any]]:
    """Those on parameters, and those that DeepSpeed sets on leaf modules."""
    hooks = [param._post_accumulate_grad_hooks for param in module.parameters()]
    return [list((each or {}).values()) for each in (*hooks, *(part._backward_hooks for part in module.modules()))]


def is_same(found: str, listed: str) -> bool:
    """Whether a difference is that of an entry of the list; some classes are listed by the package that has them."""
    words = listed.replace("['", ".").replace("']", "").replace(" policy", "").split(".")
    return words[0] == found.split(".")[0] and f".{words[-1]}" in found and words[-1] != ""


def test_what_comes_after_ours_stays_and_ours_is_not_doubled() -> None:
    class Target:
        def method(self) -> list[str]:
            return ["stock"]

    stock = Target.method
    owner = types.ModuleType("zerosync_test_owner")
    owner.Target = Target  # type: ignore[attr-defined]
    patch = patches.Patch("zerosync_test_owner.Target", "method", "a test")
    calls = lambda below, word: lambda self: [word, *below(self)]  # noqa: E731
    holders = [torch.nn.Module()]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(sys.modules, "zerosync_test_owner", owner)

        def install() -> None:
            patches.add_user(holders[0])
            patches.replace(patch, lambda below: calls(below, "ours"))

        install()
        install()
        assert Target().method() == ["ours", "stock"]
        Target.method = theirs = calls(Target.method, "theirs")  # type: ignore[method-assign]
        patches.remove_user(holders[0])
        assert Target.method is theirs and not patches.is_installed(patch)
        install()
        assert Target().method() == ["theirs", "ours", "stock"]
        patches.remove_user(holders[0])
        Target.method = stock  # type: ignore[method-assign]
        install()
        assert Target().method() == ["ours", "stock"]
        holders.clear()  # nothing refers to it any more
        gc.collect()
        assert Target.method is stock


def test_the_page_has_every_replacement() -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "how.md").read_text()
    filled = runpy.run_path(str(docs / "_site" / "replaced.py"))["filled"]
    assert filled(page) == page, "python docs/_site/replaced.py"
    for patch in patches.EVERY:
        row = f"| `{patch.owner.rpartition('.')[2]}.{patch.name}` | {patch.why} | {patch.stays or 'yes'} |"
        row = row if "." in patch.owner else f"| {patch.owner}: {patch.name} | {patch.why} | {patch.stays or 'yes'} |"
        assert row in page, row
    table = page.partition("## What is replaced")[2].partition("When the last")[0]
    assert table.count("\n| ") == len(patches.EVERY) + 2


def replacing(tree: ast.AST) -> list[str]:
    """Assignments to attributes of what is imported from a library."""
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            imported |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names = {alias.asname or alias.name.split(".")[0] for alias in node.names}
            imported |= names & {*LIBRARIES, "dist", "c10d"}
    targets = [
        target
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in ([*node.targets[0].elts] if isinstance(node.targets[0], ast.Tuple) else node.targets)
    ]
    calls = [node.args[0] for node in ast.walk(tree) if isinstance(node, ast.Call) and is_setattr(node)]
    owners = [*(target.value for target in targets if isinstance(target, ast.Attribute)), *calls]
    return [ast.unparse(owner) for owner in owners if ast.unparse(owner).split(".")[0] in imported]


def is_setattr(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id == "setattr"


# A process of its own, and what is in the list with a way of its own.
ALLOWED = {
    "plan": {"dist"}, "measures.py": {"dist.ProcessGroup"}, "gathering.py": {"partition_parameters"},
    "zero12.py": {"stage_1_and_2"}, "compilation.py": {"backend"}, "param_functions.py": {"safe_get_full_grad"},
}  # fmt: skip


def test_nothing_is_replaced_beside_the_list() -> None:
    source = Path(zerosync_strategy.__file__).parent
    found = []
    for path in sorted(source.rglob("*.py")):
        allowed = ALLOWED.get(path.parent.name, set()) | ALLOWED.get(path.name, set())
        found += [f"{path.name}: {owner}" for owner in replacing(ast.parse(path.read_text())) if owner not in allowed]
    assert found == []
    assert replacing(ast.parse("from torch.optim import SGD\nSGD.step = print")) == ["SGD"]
    assert replacing(ast.parse("import deepspeed\nsetattr(deepspeed.zero.Init, 'x', 1)")) == ["deepspeed.zero.Init"]


@pytest.mark.off_device("the simulated device ends with the process group")
def test_parameters_are_read_when_the_process_group_is_gone() -> None:
    """A program may save its model when it has torn down torch.distributed."""

    def run() -> bool:
        engine = make_engine(2)
        zerosync = attach(engine)
        train(engine)
        torch.distributed.barrier()
        values = [value.clone() for value in engine.module.state_dict().values()]
        train(engine, 1)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        now = engine.module.state_dict().values()
        changed = any((before != after).any() for before, after in zip(values, now, strict=True))
        zerosync.end()
        return changed

    assert run_ranks(run) == [True, True]


def test_deepspeed_has_the_model_once_whatever_is_detached() -> None:
    def run() -> list[int]:
        engine, found = make_engine(3), []
        for _ in range(3):
            attach(engine).detach()
            found.append(len(parameter_offload.FWD_MODULE_STACK))
        return found

    for found in run_ranks(run):
        assert len(set(found)) == 1, found
