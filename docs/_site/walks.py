"""Three walks through the code: of a gradient, of a unit of ZeRO-3, of an option. Standard library only.

``pictures.py`` draws them, and ``tests/test_walks.py`` holds them: in a real step, the first calls of the stations come
in this order.
"""

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[2] / "src" / "zerosync_strategy"


class Station(NamedTuple):
    """A function that a walk passes.

    Attributes:
        file: below the package's core/.
        name: of a function, or Class.method.
        does: what happens there, in two lines of 26 letters at most.
        when: how often, or in which part of a step.
    """

    file: str
    name: str
    does: str
    when: str


GRADIENT = (
    Station("attached/overrides.py", "EngineOverrides.backward", "engine.backward(loss) comes to our override",
            "each backward"),
    Station("gradients/window.py", "Window.engine_backward", "the window opens, or stays open", "each backward"),
    Station("gradients/window.py", "Window.added", "the hook: autograd has added to param.grad", "each gradient"),
    Station("gradients/buckets.py", "GradientBucket.collect", "its memory is counted; it stays there", "each gradient"),
    Station("attached/engine.py", "AttachedEngine.step", "the optimizer step comes to our override", "the step"),
    Station("gradients/window.py", "Window.closing", "the window is to be reduced, and closes", "the step"),
    Station("gradients/reducer.py", "Reducer.reduce", "what is still local is reduced", "the step"),
    Station("gradients/pipeline.py", "ReductionPipeline.launch", "a few buckets are in flight at a time",
            "each bucket"),
    Station("gradients/layout.py", "RowPlacement.reduce", "which rank gets which elements", "each bucket"),
    Station("comm/collectives.py", "reduce_scatter", "the reduce-scatter is issued", "each bucket"),
    Station("gradients/pipeline.py", "ReductionPipeline._add_to_shard", "this rank's average goes into its shard",
            "each bucket"),
    Station("comm/streams.py", "Streams.wait_for_reductions", "the caller's stream waits, once (B3)", "the step"),
    Station("gradients/stage12.py", "FlatShards.hand_over", "the optimizer gets the shards", "the step"),
    Station("gradients/shards.py", "Norm.value", "norm of the shards, for clipping", "the step"),
    Station("optimizer/stepper.py", "Stepper._pieces", "the shard is stepped slice by slice (H3)", "the step"),
    Station("gradients/stage12.py", "StripePlacement.give", "while the next is stepped, a slice is gathered",
            "each bucket"),
)  # fmt: skip
"""Of a gradient on stage 2, in a window of two backwards and a step."""

ON_STAGE_3 = {
    ("gradients/stage12.py", "FlatShards.hand_over"): ("gradients/stage3.py", "PerParamShards.hand_over"),
    ("gradients/stage12.py", "StripePlacement.give"): None,
}
"""What stands in the place of a station on stage 3; ``None``: nothing, modules gather parameters when they run."""

UNIT = (
    Station("attached/sharded.py", "ShardedStage.forward", "engine(batch): a forward begins", "forward"),
    Station("params/unit_hooks.py", "UnitHooks._forward_begins", "the forward of a unit begins", "forward"),
    Station("params/unit_hooks.py", "UnitHooks._fetch", "the unit needs its parameters", "gather"),
    Station("params/scheduler.py", "GatherScheduler.issue", "what is sharded is gathered in one order (U1)", "gather"),
    Station("params/sources.py", "AllShards.issue", "the shards are sent, in one message", "gather"),
    Station("engine/transitions.py", "unshard", "SHARDED -> IN_FLIGHT", "gather"),
    Station("params/issuing.py", "arrived", "this stream waits for this gather (U2)", "gather"),
    Station("engine/transitions.py", "arrive", "IN_FLIGHT -> UNSHARDED", "gather"),
    Station("params/unit_hooks.py", "UnitHooks._gather_ahead", "what followed before is gathered ahead", "gather"),
    Station("params/unit_hooks.py", "UnitHooks._forward_ends", "the forward of the unit ends", "forward"),
    Station("engine/transitions.py", "reshard", "UNSHARDED -> SHARDED", "reshard"),
    Station("params/unit_hooks.py", "UnitHooks._backward_comes", "the backward comes: it is gathered again",
            "backward"),
    Station("params/unit_hooks.py", "UnitHooks._leave", "the backward has left it: it is resharded", "backward"),
    Station("attached/sharded.py", "ShardedStage.pass_issued", "ranks compare what they gathered (W4)",
            "the step"),
    Station("attached/sharded.py", "ShardedStage.release", "what was held is resharded", "the step"),
    Station("params/module_parameters.py", "ModuleParameters.written", "the shards are stepped, copies are old",
            "the step"),
)  # fmt: skip
"""Of a unit of ZeRO-3 that is not held, in the same."""

OPTION = (
    Station("attaching.py", "attach", "attach(engine, coalesce=False)", "attach()"),
    Station("options.py", "ZeroSyncConfig.resolve", "merged with the block; unknown names raise", "attach()"),
    Station("options.py", "ZeroSyncConfig.__post_init__", "its value is checked", "attach()"),
    Station("failures/agreement.py", "require_same", "all ranks have the same options (W4)", "attach()"),
    Station("attached/engine.py", "AttachedEngine.__init__", "the parts are made, with the options", "attach()"),
    Station("attached/flat.py", "FlatStage.check_options", "what the stage cannot do raises", "attach()"),
    Station("gradients/reducer.py", "Reducer.__init__", "one of the parts reads it", "attach()"),
    Station("gradients/buckets.py", "choose_levels", "each bucket notes where its gradients stay", "attach()"),
    Station("attached/engine.py", "AttachedEngine.begin", "overrides and hooks are on the engine", "attach()"),
    Station("attached/engine.py", "AttachedEngine.summary", "the first line of the log says it", "attach()"),
    Station("gradients/reducer.py", "Reducer.begin_backward", "a backward asks the buckets", "a backward"),
    Station("gradients/reducer.py", "Reducer.reduce_complete", "a complete bucket is reduced at once", "a backward"),
)  # fmt: skip
"""Of ``coalesce=False`` on stage 2, up to the first gradient that it reduces."""


@cache
def functions_of(file: str) -> dict[int, str]:
    """Return the functions of a file below core/: by their first line, decorators included, their name."""
    found = {}

    def look(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found[min([child.lineno, *(each.lineno for each in child.decorator_list)])] = prefix + child.name
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                look(child, f"{prefix}{child.name}.")

    look(ast.parse((SOURCE / "core" / file).read_text()), "")
    return found


def members(enum: str) -> dict[str, str]:
    """Return the members of an enum in core/engine/parameter.py, each with what stands beside it."""
    text = (SOURCE / "core" / "engine" / "parameter.py").read_text()
    body = text.partition(f"class {enum}(")[2].partition("\nclass ")[0]
    return dict(re.findall(r"^    (\w+) = .*  # (.*)$", body, re.MULTILINE))


def transitions() -> dict[str, dict[str, str]]:
    """Return the table of states in core/engine/parameter.py: by event and state, what follows."""
    text = ast.get_docstring(ast.parse((SOURCE / "core" / "engine" / "parameter.py").read_text())) or ""
    _, head, rows, *_ = re.split(r"^=[= ]+$\n", text, flags=re.MULTILINE)
    split = re.compile(r" {2,}")
    _, *states = split.split(head.strip().replace("`", ""))
    table = [split.split(row.strip().replace("`", "")) for row in rows.strip().splitlines()]
    return {event: dict(zip(states, cells, strict=True)) for event, *cells in table}
