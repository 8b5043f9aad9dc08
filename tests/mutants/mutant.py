"""A mutant: one change of the package, as a block of a text file.

RULE: what is switched off
in FILE of the package
by TEST that finds it              (a node id below tests; one line for each)
simulated TEST                     (the same, with --simulated)
 line that stays
-line that goes
+line that comes
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = Path("src/zerosync_strategy")


@dataclass(frozen=True)
class Mutant:
    """One change of the package that a test must find.

    Attributes:
        rule: that it breaks.
        what: is switched off.
        file: below the package.
        old, new: whole lines there, found once, and what stands there instead.
        tests: of which at least one fails with it. All pass without.
        simulated: they run on the simulated device.
    """

    rule: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    simulated: bool

    def source(self, root: Path = ROOT) -> str:
        """Return the file with the change.

        Raises:
            ValueError: the lines are not there, or more than once.
        """
        text = "\n" + (root / PACKAGE / self.file).read_text()
        if (count := text.count("\n" + self.old)) != 1:
            raise ValueError(f"{self.rule}: {self.what}: {self.file} has {count} times\n{self.old}")
        return text.replace("\n" + self.old, "\n" + self.new).removeprefix("\n")


def read(path: Path) -> Iterator[Mutant]:
    """Yield the mutants of a file.

    Raises:
        ValueError: a block is none.
    """
    for block in re.split(r"\n{2,}", path.read_text().strip()):
        title, place, *lines = block.split("\n")
        rule, _, what = title.partition(": ")
        by = [line.split(" ", 1) for line in lines if line[0] not in " -+"]
        changed = [line for line in lines if line[0] in " -+"]
        if not (what and place.startswith("in ") and by and {word for word, _ in by} in ({"by"}, {"simulated"})):
            raise ValueError(f"{path.name}: no mutant:\n{block}")
        yield Mutant(
            rule, what, place.removeprefix("in "),
            "".join(f"{line[1:]}\n" for line in changed if line[0] != "+"),
            "".join(f"{line[1:]}\n" for line in changed if line[0] != "-"),
            tuple(test for _, test in by), by[0][0] == "simulated",
        )  # fmt: skip
