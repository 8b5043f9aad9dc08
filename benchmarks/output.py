"""What results are written with: the command, the machine; tables and pictures of what compare.py has measured."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from statistics import median
from typing import Any

COLORS = {"zerosync": "#1b7837", "stock": "#b2182b", "coalesced": "#ef8a62", "ddp": "#4d4d4d", "fsdp2": "#2166ac"}


def command() -> str:
    """The command that runs this program, as one types it in the repository, without the place of its results."""
    arguments = sys.argv[1:]
    for option in ("--out", "--output"):
        if option in arguments:
            del arguments[(at := arguments.index(option)) : at + 2]
    batch = ["chrt", "--batch", "0"] if os.sched_getscheduler(0) == os.SCHED_BATCH else []
    return shlex.join([*batch, "python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments])


def processor() -> str:
    """The name of this machine's processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown processor"


def write_markdown(results: dict[str, Any], path: Path) -> None:
    """One table for each number of micro-batches, under what was run, when, and on what."""
    per_host = results.get("per_host", 1)
    of_whom = f"host of {per_host} ranks" if per_host > 1 else "rank"
    where = "one machine's loopback" if results["where"] == "loopback" else f"one {results['rate']} link per {of_whom}"
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    optimizer = "Muon with AdamW" if any("-muon" in name for name in results["runs"][0]["systems"]) else "AdamW"
    lines = [
        f"# {results['date']}: {results['model']}, {results['ranks']} ranks, {where}",
        "",
        f"{results['parameters'] / 1e6:.1f} M parameters in fp32, {optimizer}, gloo; {results.get('batch', 1)} piece(s)"
        " of 32 tokens per rank and micro-batch.",
        f"{results['cpu']}, {results['cores']} cores, one thread per rank. {versions}.",
        "",
        f"    {results['command']}",
        "",
    ]
    for run in results["runs"]:
        lines += [f"## {run['accumulate']} micro-batch(es) per optimizer step", ""]
        lines += _budget_table(run) if results["budget_curve"] else _table(run)
        lines += ["", *_footnotes(run), ""]
        if results.get("counts_tensors"):
            lines += [*_tensors(run), ""]
        if not results["budget_curve"]:
            lines += [*_phases(run), ""]
    lines.append(
        "Phases: medians over all steps. A thread that is not working waits, for other ranks or for a processor."
    )
    lines.append(
        "ms: median of the rounds. Ratios: median over the rounds of the ratio in one round; above 1 is faster."
    )
    lines.append(
        f"MB: sent per {of_whom} and step by the interface's counter, protocol headers and acknowledgements included."
    )
    path.write_text("\n".join(lines) + "\n")


def _table(run: dict[str, Any]) -> list[str]:
    lines = [
        "| system | ms | faster than stock of its stage | faster than ddp | MB | floor MB | MB / floor |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    floor = run["floor_bytes"]
    for name, system in run["systems"].items():
        sent, ddp = median(system["bytes_sent"]), "ddp-muon" if "-muon" in name else "ddp"
        lines.append(
            f"| {name} | {1000 * median(system['seconds']):.0f} | {_faster(run, name, _stock(run, _stage(name)))}"
            f" | {_faster(run, name, ddp)} | {sent / 1e6:.2f} | {floor / 1e6:.2f} | {sent / floor:.3f} |"
        )
    return lines


def _tensors(run: dict[str, Any]) -> list[str]:
    """The most memory that tensors took, and what automatic budgets said at the end."""
    lines = ["| system | most MB of tensors at once, on any rank |", "|---|---:|"]
    lines += [f"| {name} | {system['peak_memory_bytes'] / 1e6:.1f} |" for name, system in run["systems"].items()]
    said = {name: system["report"].get("budgets") for name, system in run["systems"].items()}
    return [*lines, "", *(f"**{name}** {text}.  " for name, text in said.items() if text not in (None, "None"))]


def _phases(run: dict[str, Any]) -> list[str]:
    """Where the time of a step goes on rank 0, in milliseconds."""
    found = {name: system["phases"] for name, system in run["systems"].items() if system.get("phases")}
    columns = list(dict.fromkeys(name for phases in found.values() for name in phases))
    lines = [
        "| ms of a step, rank 0 | " + " | ".join(columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    for name, phases in found.items():
        if "forward" in phases:
            lines.append(f"| {name} | " + " | ".join(f"{1000 * phases.get(each, 0.0):.0f}" for each in columns) + " |")
    return lines if len(lines) > 2 else []


def _footnotes(run: dict[str, Any]) -> list[str]:
    systems = run["systems"]
    alike = [system["difference"] for system in systems.values() if not system["remark"]]
    lines = [
        f"Parameters at the end: the same on every rank, and within {max(alike):.1e} of those of {run['reference']}"
        f"{', but for the systems named next' if len(alike) < len(systems) else ''}. Training moved one by up to"
        f" {run['moved']:.1e}."
    ]
    lines += [f"**{name}** {system['remark']}." for name, system in systems.items() if system["remark"]]
    stock = {stage: name for stage in "123" if (name := _stock(run, stage))}
    if stock:
        lines.append(f"Stock of its stage: {', '.join(f'{name} for stage {stage}' for stage, name in stock.items())}.")
    memory = [system["peak_memory_bytes"] / 2**30 for system in systems.values()]
    lines.append(f"Peak memory of a rank: {min(memory):.1f} to {max(memory):.1f} GiB, depending on the system.")
    return [line + "  " for line in lines]


def _budget_table(run: dict[str, Any]) -> list[str]:
    lines = [
        "| budget, % of the gradients | ms | peak unreduced MB | MB sent by rank 0 | MB sent, counter | MB / floor |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for name, system in run["systems"].items():
        sent = median(system["bytes_sent"])
        lines.append(
            f"| {name.partition('@')[2]} | {1000 * median(system['seconds']):.0f}"
            f" | {system['peak_unreduced_bytes'] / 1e6:.2f} | {system['report']['bytes_sent'] / 1e6:.2f}"
            f" | {sent / 1e6:.2f} | {sent / run['floor_bytes']:.3f} |"
        )
    return lines


def _stage(name: str) -> str:
    """The ZeRO stage in a system's name; of FSDP2 the one that does the same; none of DDP."""
    return name.removeprefix("lightning-").partition("-")[2][:1]


def _stock(run: dict[str, Any], stage: str) -> str | None:
    """What systems of this stage are compared with: stock DeepSpeed, under Lightning where that ran."""
    names = (f"lightning-stock-{stage}", f"stock-{stage}", f"stock-{stage}-muon")
    return next((name for name in names if name in run["systems"]), None)


def _faster(run: dict[str, Any], name: str, reference: str | None) -> str:
    if reference not in run["systems"]:
        return "-"
    pairs = zip(run["systems"][reference]["seconds"], run["systems"][name]["seconds"], strict=True)
    return f"{median(theirs / ours for theirs, ours in pairs):.2f}"


def draw(results: dict[str, Any], path: Path) -> None:
    """The same as a picture.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    title = f"{results['model']}, {results['ranks']} ranks, {results['where']}, {results['date']}"
    if results["budget_curve"]:
        figure = _draw_budget(pyplot, results)
    else:
        figure = _draw_bars(pyplot, results)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_bars(pyplot: Any, results: dict[str, Any]) -> Any:
    runs = results["runs"]
    names = list(runs[0]["systems"])
    colors = [COLORS[name.removeprefix("lightning-").partition("-")[0]] for name in names]
    hatches = ["//" if name.startswith("lightning-") else "" for name in names]
    size = (12, 1 + len(runs) * (0.8 + 0.24 * len(names)))
    figure, axes = pyplot.subplots(len(runs), 2, squeeze=False, figsize=size, layout="constrained")
    for run, (left, right) in zip(runs, axes, strict=True):
        floor = run["floor_bytes"]
        milliseconds = [1000 * median(run["systems"][name]["seconds"]) for name in names]
        ratios = [median(run["systems"][name]["bytes_sent"]) / floor for name in names]
        for axis, values, form in ((left, milliseconds, "%.0f"), (right, ratios, "%.2f")):
            axis.bar_label(
                axis.barh(names, values, color=colors, hatch=hatches, edgecolor="white"),
                fmt=form,
                padding=3,
                fontsize=8,
            )
            axis.invert_yaxis()
            axis.margins(x=0.12)
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(axis="y", labelsize=8)
        left.set_title(f"{run['accumulate']} micro-batches: ms per optimizer step", fontsize=10)
        right.set_title(f"bytes sent, in floors of {floor / 1e6:.1f} MB", fontsize=10)
        right.axvline(1, color="black", linewidth=0.8, linestyle="--")
    return figure


def _draw_budget(pyplot: Any, results: dict[str, Any]) -> Any:
    figure, axis = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for run in results["runs"]:
        systems = run["systems"].values()
        peaks = [system["peak_unreduced_bytes"] / 1e6 for system in systems]
        sent = [median(system["bytes_sent"]) / 1e6 for system in systems]
        axis.plot(peaks, sent, marker="o", label=f"{run['accumulate']} micro-batch(es)")
    axis.axhline(results["runs"][0]["floor_bytes"] / 1e6, color="black", linewidth=0.8, linestyle="--", label="floor")
    axis.set_xlabel("peak of unreduced gradients on a rank, MB")
    axis.set_ylabel("sent per rank and optimizer step, MB")
    axis.set_ylim(bottom=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend()
    return figure
