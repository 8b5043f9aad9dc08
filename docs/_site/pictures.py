"""Draws docs/pictures/*.svg: python docs/_site/pictures.py. Standard library only.

The stations of the walks, and the states of a parameter, are those of walks.py.

A picture has no background. Its ink follows the colour scheme: that of the reader's system where it is an image, and
that of the page where it is part of one (docs/_site/hooks.py, docs/style.css).
"""

import json
import sys
import textwrap
from html import escape
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
import walks

OUT = Path(__file__).parent.parent / "pictures"
RESULTS = OUT.parent.parent / "benchmarks" / "results"
STYLE = """
.zs{--ink:#1f2328;--soft:#656d76;--line:#8c959f;--panel:#8c959f22}
@media (prefers-color-scheme:dark){.zs{--ink:#e6edf3;--soft:#9198a1;--line:#6e7681}}
.zs text{font-family:system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;font-size:14px;fill:var(--ink)}
.zs .soft{fill:var(--soft)}.zs .on{fill:#1f2328}.zs .bold{font-weight:600}.zs .small{font-size:12px}
.zs .line{stroke:var(--line);fill:none;stroke-width:1.5}.zs .head{fill:var(--line)}.zs .panel{fill:var(--panel)}
"""
FORWARD, BACKWARD, STEP, REDUCE, GATHER = "#9ec5fe", "#6ea8fe", "#c4b5fd", "#f6ad55", "#86d9a0"
RANKS = ("#9ec5fe", "#86d9a0", "#f6d55c", "#f5a3a3")


class Picture:
    """An SVG under construction."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, fill: str, text: str = "", kind: str = "on") -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" fill="{fill}"/>')
        if text:
            self.text(x + w / 2, y + h / 2 + 5, text, kind, "middle")

    def panel(self, x: float, y: float, w: float, h: float, radius: float = 6) -> None:
        self.parts.append(f'<rect class="panel" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{radius:g}"/>')

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>')

    def line(self, path: str, arrow: bool = False, dashed: bool = False) -> None:
        more = (' marker-end="url(#head)"' if arrow else "") + (' stroke-dasharray="4 4"' if dashed else "")
        self.parts.append(f'<path class="line" d="{path}"{more}/>')

    def save(self, name: str) -> None:
        head = (
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7"'
            ' orient="auto-start-reverse"><path class="head" d="M0 0L10 5L0 10z"/></marker></defs>'
        ).replace('"head" v', f'"head-{name}" v')
        body = "\n".join(self.parts).replace("#head)", f"#head-{name})")
        (OUT / f"{name}.svg").write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" class="zs" viewBox="0 0 {self.width} {self.height}"'
            f' role="img" aria-label="{escape(self.title)}">\n<style>{STYLE}</style>\n{head}\n{body}\n</svg>\n'
        )


def timeline() -> None:
    """Four micro-batches of stage 2, and of stage 3, stock and ours. Lengths are chosen, not measured."""
    title = "Timeline of an optimizer step of four micro-batches: stock DeepSpeed reduces and gathers in each of them, "
    picture = Picture(960, 500, title + "ZeroSync reduces once, in the last backward")
    f, b, r, g, s, scale, left = 1, 1.5, 3, 1.5, 1, 33, 96

    def lanes(y: float, name: str, compute: list[tuple[float, float, str, str]], network: list) -> None:
        picture.text(8, y + 13, name, "bold")
        for index, (lane, boxes) in enumerate((("compute", compute), ("network", network))):
            top = y + 22 + index * 32
            picture.text(left - 10, top + 18, lane, "soft small", "end")
            picture.panel(left, top, 960 - left - 8, 27, 3)
            for start, length, fill, text in boxes:
                picture.box(left + start * scale + 1, top + 1, length * scale - 2, 25, fill, text, "on small")

    def stock_2() -> tuple[list, list]:
        compute, network, now, free = [], [], 0.0, 0.0
        for _ in range(4):
            now = max(now, free - f)  # the next backward's buckets wait for the last one's
            compute += [(now, f, FORWARD, "F"), (now + f, b, BACKWARD, "B")]
            free = max(free, now + f + 0.3) + r
            network.append((free - r, r, REDUCE, "reduce"))
            now += f + b
        compute.append((free, s, STEP, "step"))
        network.append((free + s, g, GATHER, "gather"))
        return compute, network

    def ours_2() -> tuple[list, list]:
        compute = [
            (i * (f + b) + d, w, c, t) for i in range(4) for d, w, c, t in ((0, f, FORWARD, "F"), (f, b, BACKWARD, "B"))
        ]
        begin = 3 * (f + b) + f + 0.3
        return [*compute, (begin + r, s, STEP, "step")], [
            (begin, r, REDUCE, "reduce"),
            (begin + r + s, g, GATHER, "gather"),
        ]

    def stock_3() -> tuple[list, list]:
        compute, network, free = [], [], 0.0
        for _ in range(4):
            network += [
                (free, g, GATHER, "gather"),
                (free + g, g, GATHER, "gather"),
                (free + 2 * g, r, REDUCE, "reduce"),
            ]
            compute += [(free + 0.6, f, FORWARD, "F"), (free + g + 0.6, b, BACKWARD, "B")]
            free += 2 * g + r
        return [*compute, (free, s, STEP, "step")], network

    def ours_3() -> tuple[list, list]:
        start = g - f + 0.4
        compute, network = ours_2()
        return [(x + start, w, c, t) for x, w, c, t in compute], [
            (0, g, GATHER, "gather"), *((x + start, w, c, t) for x, w, c, t in network[:1])
        ]  # fmt: skip

    lanes(8, "Stage 2, stock", *stock_2())
    lanes(108, "Stage 2, ZeroSync", *ours_2())
    lanes(218, "Stage 3, stock", *stock_3())
    lanes(318, 'Stage 3, ZeroSync with param_memory_budget="all"', *ours_3())
    keys = (
        ("F, forward", FORWARD),
        ("B, backward", BACKWARD),
        ("step", STEP),
        ("reduction of gradients", REDUCE),
        ("gather of parameters", GATHER),
    )
    x = left
    for text, fill in keys:
        picture.box(x, 430, 16, 16, fill)
        picture.text(x + 22, 443, text, "small")
        x += 40 + 7.2 * len(text)
    picture.text(
        left, 475, "Lengths are chosen to show the order, on a slow link. They are no measurement.", "soft small"
    )
    picture.save("timeline")


def stripes() -> None:
    """The flat buffer of a group on four ranks with four buckets."""
    picture = Picture(
        960, 470, "A flat buffer among four ranks: one piece each in DeepSpeed, a row of each stripe in ZeroSync"
    )
    left, width = 16, 928
    picture.text(left, 22, "The flat buffer of a group of parameters, in the order of the model", "bold")
    sizes = (3, 5, 2, 6, 4, 3, 5, 4)
    x = float(left)
    for number, size in enumerate(sizes):
        w = width * size / sum(sizes)
        picture.panel(x + 1, 32, w - 2, 26, 3)
        picture.text(x + w / 2, 50, f"p{number}", "small", "middle")
        x += w
    picture.line(f"M{left + width} 74H{left + width - 320}", arrow=True)
    picture.text(left + width - 330, 79, "backward completes gradients from the end", "soft small", "end")

    picture.text(left, 120, "DeepSpeed: one piece per rank", "bold")
    for rank in range(4):
        picture.box(left + rank * width / 4 + 1, 130, width / 4 - 2, 34, RANKS[rank], f"rank {rank}")
    picture.text(
        left, 186, "The first gradients belong to rank 3 alone: one link is busy after the other.", "soft small"
    )

    picture.text(left, 232, "ZeroSync: a stripe per bucket, with a row per rank", "bold")
    bounds = (0, 0.22, 0.5, 0.74, 1)
    for index in range(4):
        first, last = left + bounds[index] * width, left + bounds[index + 1] * width
        picture.text((first + last) / 2, 254, f"stripe {index}", "small", "middle")
        for rank in range(4):
            w = (last - first - 4) / 4
            picture.box(first + 2 + rank * w + 0.5, 262, w - 1, 34, RANKS[rank], str(rank))
    picture.text(left, 318, "Every stripe is reduced and gathered evenly, by one collective, in place.", "soft small")

    picture.text(left, 364, "The shard of rank 1: its row of every stripe, one after the other", "bold")
    x = float(left)
    for index in range(4):
        w = (bounds[index + 1] - bounds[index]) * width / 4
        picture.box(x + 0.5, 374, w - 1, 34, RANKS[1], f"{index}")
        x += w
    picture.text(x + 14, 396, "as many elements as DeepSpeed's shard", "soft small")
    picture.text(
        left,
        440,
        "Checkpoints are in DeepSpeed's layout: the ranks exchange elements before one is written.",
        "soft small",
    )
    picture.save("stripes")


def window() -> None:
    """The states of a window."""
    picture = Picture(960, 400, "The states of a window: CLOSED, OPEN and REDUCED, with what leads from one to another")
    boxes = {
        "CLOSED": (30, "no gradient since the step"),
        "OPEN": (370, "gradients are local, or reduced in part"),
        "REDUCED": (710, "every gradient is in its shard"),
    }
    for name, (x, text) in boxes.items():
        picture.panel(x, 150, 220, 86, 10)
        picture.text(x + 110, 186, name, "bold", "middle")
        words = text.split(", ")
        for line, part in enumerate(words):
            picture.text(
                x + 110, 208 + 16 * line, part + ("," if line < len(words) - 1 else ""), "soft small", "middle"
            )
    picture.line("M250 178H366", arrow=True)
    picture.text(308, 168, "backward", "", "middle")
    picture.line("M370 212H254", arrow=True)
    picture.text(310, 232, "closing,", "", "middle")
    picture.text(310, 248, "abort", "", "middle")
    picture.line("M590 178H706", arrow=True)
    picture.text(648, 168, "reduce", "", "middle")
    picture.line("M710 212H594", arrow=True)
    picture.text(650, 232, "zero_grad", "", "middle")
    picture.line("M450 150C430 80 530 80 510 148", arrow=True)
    picture.text(480, 88, "backward, zero_grad", "", "middle")
    picture.line("M820 236C820 345 140 345 140 240", arrow=True)
    picture.text(480, 310, "closing, abort", "", "middle")
    picture.text(30, 30, "closing comes before the optimizer step. In OPEN, it reduces first.", "small")
    picture.text(30, 370, "Dropped by abort and zero_grad, gradients are gone; neither sends anything.", "soft small")
    picture.text(
        30,
        390,
        "An error: closing in CLOSED (no backward ran), and a backward in REDUCED (a step must come first).",
        "soft small",
    )
    picture.save("window")


def host_cache() -> None:
    """Where a parameter comes from, by micro-batch, within a device budget, in host memory, and beyond both."""
    picture = Picture(
        960, 330, "Where the parameters of a window of three micro-batches come from, by where they are kept"
    )
    left, column, top = 250, 226, 62
    for index in range(3):
        picture.text(left + index * column + column / 2, 28, f"micro-batch {index + 1}", "bold", "middle")
    rows = (
        ("on the device", '"device"', ("gather", "held", "held")),
        ("in host memory", '"host"', ("gather, copy to the host", "copy back", "copy back")),
        ("neither", "does not fit", ("gather", "gather", "gather")),
        ("frozen, in host memory", "from the second step on", ("copy back", "copy back", "copy back")),
    )
    fills = {"gather": GATHER, "held": "#d0d7de", "copy back": REDUCE, "gather, copy to the host": GATHER}
    for row, (name, where, cells) in enumerate(rows):
        y = top - 18 + row * 58
        picture.text(8, y + 18, name, "bold")
        picture.text(8, y + 36, where, "soft small")
        for index, cell in enumerate(cells):
            picture.box(left + index * column + 4, y, column - 8, 40, fills[cell], cell)
    picture.text(left, top + 232, "green: over the network; orange: over the bus of this host", "soft small")
    picture.text(left, top + 252, "A step drops all but frozen parameters; an edit drops what it edits.", "soft small")
    picture.save("host_cache")


def nodes() -> None:
    """What each of two ranks on each of two nodes keeps, and what is sent when, by level."""
    picture = Picture(
        960, 452, "What a rank keeps in full, in node shards and in ZeRO's shards, and what each sends in a step"
    )
    left, column, row, between, within, nothing = 322, 158, 116, REDUCE, GATHER, "#d0d7de"
    for x, text in ((8, "level"), (190, "kept by rank")):
        picture.text(x, 24, text, "bold")
    for index, text in enumerate(("micro-batch 1", "micro-batch 2", "micro-batch 3", "close")):
        picture.text(left + (index + 0.5) * column, 24, text, "bold", "middle")
    rows = (
        ("in full", '"device"', "P", 1.0, (between, nothing, nothing), (nothing,) * 3, between),
        ("in node shards", '"node"', "P / G", 0.5, (between, within, within), (within,) * 3, between),
        ("in ZeRO's shards", "what is left", "P / (M G)", 0.25, (between,) * 3, (between,) * 3, nothing),
    )
    for number, (name, where, size, part, gathers, reductions, close) in enumerate(rows):
        top = 44 + number * row
        picture.text(8, top + 24, name, "bold")
        picture.text(8, top + 44, where, "soft small")
        picture.text(8, top + 64, size, "soft small")
        for rank in range(4):  # a node has two
            x = 184 + 26 * rank + 14 * (rank // 2)
            picture.panel(x, top, 22, 84, 3)
            picture.box(x, top + 84 * (1 - part), 22, 84 * part, FORWARD)
        for index, (gather, reduction) in enumerate(zip(gathers, reductions, strict=True)):
            x = left + index * column + 4
            picture.box(x, top, column - 8, 38, gather, "held" if gather == nothing else "gather")
            picture.box(x, top + 46, column - 8, 38, reduction, "add up" if reduction == nothing else "reduce")
        text = "step" if close == nothing else "reduce, step"
        picture.box(left + 3 * column + 4, top, column - 8, 84, close, text)
    for number in range(2):
        picture.text(208 + 66 * number, 44 + 3 * row - 12, f"node {number}", "soft small", "middle")
    keys = ((between, "crosses between nodes"), (within, "stays within the node"), (nothing, "nothing is sent"))
    for index, (fill, text) in enumerate(keys):
        picture.box(8 + 210 * index, 414, 16, 16, fill)
        picture.text(30 + 210 * index, 427, text, "small")
    picture.text(640, 427, "M nodes of G ranks; here 2 of 2", "soft small")
    picture.save("nodes")


def divergence() -> None:
    """A rank with text beside one with an image too: stock waits for ever, what is held needs no gather in a module."""
    picture = Picture(
        960, 400, "Two ranks that run different modules: stock hangs in a gather, ZeroSync has made one gather before"
    )
    left, scale = 96, 84

    def lanes(y: float, name: str, ranks: tuple[list, list]) -> None:
        picture.text(8, y, name, "bold")
        for rank, boxes in enumerate(ranks):
            top = y + 12 + rank * 40
            picture.text(left - 10, top + 21, f"rank {rank}", "soft small", "end")
            picture.panel(left, top, 960 - left - 8, 34, 3)
            x = float(left)
            for length, fill, text in boxes:
                picture.box(x + 1, top + 1, length * scale - 2, 32, fill, text, "on small")
                x += length * scale

    gather = (0.8, GATHER, "gather")
    text = [gather, (1.1, FORWARD, "embedding")]
    hang = (3.6, REDUCE, "gather of layer 1: waits for ever")
    lanes(26, "Stock: a gather in each module needs all ranks", (
        [*text, hang], [*text, (3.6, REDUCE, "gather of vision: waits for ever")]
    ))  # fmt: skip
    layers = [(1.1, FORWARD, "layer 1"), (1.1, FORWARD, "layer 2")]
    backward, end = (1.4, BACKWARD, "backward"), [(1.1, REDUCE, "reduce"), (0.7, STEP, "step")]
    all_of_it = [(2.0, GATHER, "gather of all"), (1.1, FORWARD, "embedding")]
    lanes(156, 'ZeroSync, param_memory_budget="all": no module communicates', (
        [*all_of_it, *layers, backward, (1.3, "none", ""), *end],
        [*all_of_it, (1.3, FORWARD, "vision"), *layers, backward, *end],
    ))  # fmt: skip
    picture.text(
        left, 290, "The ranks meet in the window's first gather and in its reduction, whatever they ran between."
    )
    picture.text(
        left, 318, "The gradient of the vision tower is the mean over both ranks, with zeros of rank 0.", "soft small"
    )
    picture.text(left, 340, "Lengths are chosen. They are no measurement.", "soft small")
    picture.height = 356
    picture.save("divergence")


def generation() -> None:
    """Tokens per second and bytes by way to generate, as they were measured."""
    found = json.loads((RESULTS / "2026-11-28-generation-link.json").read_text())
    names = {
        "stock": "stock, stage 3", "stock-trl": "stock, TRL's unwrapping", "zerosync": "ZeroSync, stage 3",
        "zerosync-trl": "ZeroSync, TRL's unwrapping", "zerosync-gathered": "ZeroSync, gathered_for_inference()",
    }  # fmt: skip
    picture = Picture(960, 262, "Tokens per second and megabytes sent per token, by way to generate")
    count = found["ranks"] * found["prompts"] * found["tokens"]
    speeds = {way: count / median(each["seconds"]) for way, each in found["ways"].items()}
    sent = {way: median(each["bytes_sent"]) / found["tokens"] / 1e6 for way, each in found["ways"].items()}
    panels = (
        (262, "tokens per second, all ranks", speeds, "{:.0f}"),
        (640, "MB sent per rank and token", sent, "{:.3g}"),
    )
    for left, title, values, form in panels:
        picture.text(left, 24, title, "bold")
        for row, (way, value) in enumerate(values.items()):
            y, length = 42 + row * 42, 250 * value / max(values.values())
            picture.box(left, y, max(length, 2), 28, FORWARD if way.startswith("zerosync") else "#8c959f")
            picture.text(left + length + 8, y + 19, form.format(value), "small")
    for row, way in enumerate(found["ways"]):
        picture.text(250, 61 + row * 42, names[way], "small", "end")
    picture.save("generation")


LAYERS = (
    (("lightning", "fabric", "accelerate"), "frontends translate one framework each; they enter core by frontend.py"),
    (("attached",), "one engine while ZeroSync is attached; beside it what a program holds: handle, report"),
    (("budgets", "optimizer", "checkpoints"), "what is held, what steps, what is saved"),
    (("gradients", "params"), "the window and the reduction; gathers, holding and reading of ZeRO-3"),
    (("failures",), "what every rank was doing, and where ranks differ"),
    (("comm",), "collectives, streams, counts of bytes"),
    (("engine",), "internals of DeepSpeed and torch: contract, accessors, patches"),
)
"""Rooms of the package, those above import those below."""


def rooms() -> None:
    """The rooms of the package, as layers."""
    picture = Picture(960, 520, "The rooms of the package: imports go downwards")
    left, width, fills = 96, 560, (STEP, FORWARD, GATHER, GATHER, REDUCE, REDUCE, "#d0d7de")
    picture.text(left, 22, "Imports go downwards.", "bold")
    for row, ((names, text), fill) in enumerate(zip(LAYERS, fills, strict=True)):
        y = 40 + 64 * row
        for place, name in enumerate(names):
            w = width / len(names)
            picture.box(left + place * w + 2, y, w - 4, 32, fill, name)
        picture.text(left + 2, y + 48, text, "soft small")
    picture.line(f"M{left - 14} 104V486")
    picture.line(f"M{left - 14} 104H{left - 6}")
    picture.line(f"M{left - 14} 486H{left - 6}")
    picture.text(left - 24, 300, "core", "bold", "end")
    right = left + width + 24
    picture.panel(right, 40, 260, 100)
    picture.text(right + 130, 62, "tools", "bold", "middle")
    for row, name in enumerate(("plan", "doctor")):
        picture.box(right + 14, 74 + 32 * row, 232, 27, STEP, name)
    picture.text(right, 160, "use core; nothing imports them", "soft small")
    picture.panel(right, 232, 260, 46)
    picture.box(right + 14, 239, 232, 32, "#d0d7de", "options")
    picture.text(right, 298, "any room may read the options", "soft small")
    picture.save("rooms")


WHEN = {
    "each backward": BACKWARD, "each gradient": FORWARD, "each bucket": REDUCE, "the step": STEP, "forward": FORWARD,
    "gather": GATHER, "reshard": "#d0d7de", "backward": BACKWARD, "attach()": FORWARD, "a backward": BACKWARD,
}  # fmt: skip
"""The colour of a station, by when it is passed."""


def walk(name: str, title: str, stations: tuple[walks.Station, ...], notes: tuple[str, ...]) -> None:
    """Four stations a row: what happens there in the box, the function below it."""
    pitch, height, left, width = 238, 116, 22, 212
    rows = -(-len(stations) // 4)
    picture = Picture(960, 36 + rows * height + 34 + 20 * len(notes), title)
    for number, station in enumerate(stations):
        x, y = left + pitch * (number % 4), 30 + height * (number // 4)
        picture.text(x, y - 6, f"{number + 1}", "bold")
        picture.box(x, y, width, 52, WHEN[station.when])
        lines = textwrap.wrap(station.does, 27)
        for line, words in enumerate(lines):
            picture.text(x + width / 2, y + 31 - 10 * (len(lines) - 1) + 20 * line, words, "on", "middle")
        picture.text(x + width / 2, y + 68, station.file, "soft small", "middle")
        picture.text(x + width / 2, y + 84, station.name, "small", "middle")
        if number % 4:
            picture.line(f"M{x - 25} {y + 26}H{x - 2}", arrow=True)
        elif number:
            picture.line(f"M4 {y + 26}H{x - 2}", arrow=True)
            picture.line(f"M{left + 3 * pitch + width + 2} {y - height + 26}H956")
    y = 30 + rows * height
    for place, when in enumerate(dict.fromkeys(station.when for station in stations)):
        picture.box(left + 180 * place, y, 14, 14, WHEN[when])
        picture.text(left + 180 * place + 22, y + 12, when, "small")
    for line, note in enumerate(notes):
        picture.text(left, y + 38 + 20 * line, note, "soft small")
    picture.save(name)


def gradient() -> None:
    """The walk of a gradient, from the backward to the parameters that its step has changed."""
    number = {station[:2]: place + 1 for place, station in enumerate(walks.GRADIENT)}
    others = [f"{number[here]} is {there[0]}" for here, there in walks.ON_STAGE_3.items() if there is not None]
    out = [str(number[here]) for here, there in walks.ON_STAGE_3.items() if there is None]
    notes = (
        "Stage 2, a window of two backwards and a step. With a budget, or where the last backward is known, 8 to 11"
        " come in backwards.",
        f"On stage 3, {', '.join(others)}, and {', '.join(out)} is left out: modules gather parameters when they run.",
    )
    walk("gradient", "The walk of a gradient: collected, reduced, added to its shard, stepped", walks.GRADIENT, notes)


def unit() -> None:
    """The walk of a unit of ZeRO-3 that is not held."""
    notes = (
        "A unit that is held (params/held.py) is gathered once in a window, by params/cache.py, and stays until 15.",
    )
    walk("unit", "The walk of a unit of ZeRO-3: gathered, used, resharded, stepped", walks.UNIT, notes)


def option() -> None:
    """The walk of an option."""
    walk("option", "The walk of an option: given, checked, agreed on, read by a part, in effect", walks.OPTION, ())


def parameter() -> None:
    """The states of a ZeRO-3 parameter, and its values through one window."""
    picture = Picture(960, 560, "The states of a ZeRO-3 parameter: SHARDED, IN_FLIGHT and UNSHARDED, and one window")
    states = walks.members("State")
    for place, (name, text) in enumerate(states.items()):
        picture.panel(8 + 372 * place, 40, 200, 74, 10)
        picture.text(108 + 372 * place, 72, name, "bold", "middle")
        picture.text(108 + 372 * place, 96, text, "soft small", "middle")
    names, arrows = list(states), {}
    for event, row in walks.transitions().items():
        for before, cell in row.items():
            if "-> " in cell:
                arrows.setdefault((before, cell.partition("-> ")[2].partition(";")[0]), []).append(event)
    for (before, after), events in arrows.items():
        x, end = (108 + 372 * names.index(state) for state in (before, after))
        if end > x:
            picture.line(f"M{x + 100} 77H{end - 104}", arrow=True)
            picture.text((x + end) / 2, 67, ", ".join(events), "", "middle")
        else:
            picture.line(f"M{x} 114C{x} 170 {end} 170 {end} 118", arrow=True)
            picture.text((x + end) / 2, 178, f"{', '.join(events)}, once no claim is left", "", "middle")
    left, width, top = 200, 740, 232
    events = ("forward 1", "backward 1", "forward 2", "backward 2", "step")
    column = width / len(events)
    for place, name in enumerate(events):
        picture.text(left + (place + 0.5) * column, top - 12, name, "bold", "middle")
    rows = (
        ("not held", "gathered at each use", ((0, 0.2, 0), (0.2, 0.9, 1), (1, 1.2, 0), (1.2, 1.9, 1), (2, 2.2, 0),
         (2.2, 2.9, 1), (3, 3.2, 0), (3.2, 3.9, 1))),
        ("held", "params/held.py", ((0, 0.2, 0), (0.2, 4, 1))),
        ("read, outside of its module", "params/intercepted.py", ((2.3, 2.5, 0), (2.5, 2.8, 1))),
        ("held and constant", "no optimizer trains it (R4)", ((0, 0.2, 0), (0.2, 5, 1))),
    )  # fmt: skip
    for row, (name, text, bars) in enumerate(rows):
        y = top + 52 * row
        picture.panel(left, y, width, 30, 3)
        picture.text(8, y + 14, name, "small bold")
        picture.text(8, y + 30, text, "soft small")
        for begin, end, kind in bars:
            fill = (REDUCE, GATHER)[kind]
            picture.box(left + begin * column + 1, y + 2, (end - begin) * column - 2, 26, fill)
    y = top + 52 * len(rows) + 8
    for x, fill, name in ((left, REDUCE, "IN_FLIGHT"), (left + 130, GATHER, "UNSHARDED")):
        picture.box(x, y, 14, 14, fill)
        picture.text(x + 22, y + 12, name, "small")
    picture.panel(left + 270, y, 14, 14, 3)
    picture.text(left + 292, y + 12, "SHARDED", "small")
    notes = (
        f"Claims keep the values: {', '.join(walks.members('Claim'))}. engine/parameter.py says what each is for.",
        "WRITE goes to the shard at once and counts; a step, a checkpoint and a context that has written reshard in"
        " spite of claims.",
    )
    for line, note in enumerate(notes):
        picture.text(8, y + 48 + 22 * line, note, "soft small")
    picture.save("parameter")


DRAWN = (
    timeline, stripes, window, host_cache, nodes, divergence, generation, rooms, gradient, unit, option, parameter,
)  # fmt: skip


def draw_all() -> None:
    for draw in DRAWN:
        draw()


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    draw_all()
