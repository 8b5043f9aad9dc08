"""A plan as a configuration to use, as YAML for Accelerate, and as a picture."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

from zerosync_strategy.core.options.config import BLOCK
from zerosync_strategy.tools.plan.jobs import STOCK
from zerosync_strategy.tools.plan.plan import Outcome, Plan


def accelerate_yaml(plan: Plan, outcome: Outcome) -> str:
    """Return a configuration for ``accelerate launch`` on the plan's ranks."""
    given = {name: value for name, value in plan.workload.deepspeed.items() if name != BLOCK}
    zero = {**given.pop("zero_optimization", {}), **outcome.configuration["zero_optimization"]}
    deepspeed = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        **given,
        "zero_optimization": zero,
        BLOCK: outcome.configuration[BLOCK],
    }
    text = json.dumps(deepspeed, indent=1).replace("\n", "\n    ")
    return (
        "compute_environment: LOCAL_MACHINE\n"
        "distributed_type: DEEPSPEED\n"
        f"mixed_precision: {'bf16' if plan.workload.dtype == 'bf16' else 'no'}\n"
        f"num_machines: {plan.cluster.ranks // plan.cluster.per_node}\n"
        f"num_processes: {plan.cluster.ranks}\n"
        "machine_rank: 0  # of each machine its own\n"
        "deepspeed_config:\n"
        "  zero3_init_flag: false\n"
        f"  deepspeed_config_file: >-\n    {text}\n"
    )


def require_matplotlib() -> None:
    """Check that a picture can be drawn.

    Raises:
        ValueError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ValueError("--png needs matplotlib, which is not installed: pip install matplotlib")


def draw(plan: Plan, file: Path) -> None:
    """Draw memory against the links' time of all option sets, by number, the front as a line. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 5))
    numbers: dict[tuple[float, float], list[str]] = {}  # by place, which several option sets may share
    for number, each in enumerate(plan.outcomes, 1):
        is_stock = each.options.system == STOCK
        x, y = each.memory / 1e9, each.sent.in_turn
        axes.plot(
            x, y, "x" if is_stock else "o", color="tab:gray" if is_stock else "tab:blue",
            label=f"{number}  {each.options.name}",
        )  # fmt: skip
        numbers.setdefault((round(x, 2), float(f"{y:.3g}")), []).append(str(number))
    for place, there in numbers.items():
        axes.annotate(", ".join(there), place, textcoords="offset points", xytext=(5, 5), fontsize=8)
    front = plan.front
    axes.plot([each.memory / 1e9 for each in front], [each.sent.in_turn for each in front], color="tab:blue")
    if plan.cluster.memory is not None:
        axes.axvline(plan.cluster.memory / 1e9, color="tab:red", linestyle="--", label="device memory")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=7)
    axes.set(xlabel="GB at the peak", ylabel="seconds of the links for a step's bytes")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
