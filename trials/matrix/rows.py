"""The rows of the matrix: releases that are installed together, and the tests that each of them runs."""

from dataclasses import dataclass, field

# What every row runs: the contract with each release, random programs against the oracle, and the frameworks.
CONTRACT = [
    "tests/core/test_releases.py", "tests/core/test_attach.py", "tests/core/test_fragments.py",
    "tests/core/test_stripes.py",
]  # fmt: skip
PROGRAMS = ["tests/core/test_random_programs.py"]
LIGHTNING = [
    "tests/lightning/test_automatic.py", "tests/lightning/test_manual.py", "tests/lightning/test_other_package.py",
    "tests/fabric",
]  # fmt: skip
ACCELERATE = ["tests/accelerate/test_semantics.py", "tests/accelerate/test_plugin.py"]
# For each release of DeepSpeed by itself, with the other packages as they were tested.
RELEASE = ["--extended=all", *CONTRACT, "tests/core/test_random_programs.py::test_random_programs"]
ALL = ["--extended=all", *CONTRACT, *PROGRAMS, *LIGHTNING, *ACCELERATE]


@dataclass(frozen=True)
class Row:
    """Releases that are tested together.

    Attributes:
        name: in the table, and on the command line.
        pins: release by package; an environment of its own has the newest of what is not pinned.
        python: the interpreter's version; empty: that of the environment that runs the matrix. With neither this nor
            torch pinned, and no ``fresh``, a row is a layer of packages over that environment, made in seconds.
        fresh: whether it has an environment of its own in any case.
        tests: arguments for pytest.
    """

    name: str
    pins: dict[str, str] = field(default_factory=dict)
    python: str = ""
    fresh: bool = False
    tests: tuple[str, ...] = tuple(ALL)

    @property
    def is_layer(self) -> bool:
        return not (self.fresh or self.python or "torch" in self.pins)


def lightning(version: str) -> dict[str, str]:
    """Both packages of the library, of one release."""
    return {"lightning": version, "pytorch-lightning": version}


# The releases of DeepSpeed that no other row has.
_BY_RELEASE = [f"0.18.{patch}" for patch in range(5, 9)] + [f"0.19.{patch}" for patch in range(8) if patch != 5]

ROWS = [
    Row(
        "LLaMA-Factory, open-instruct",
        {
            "torch": "2.10.0", "deepspeed": "0.18.4", "accelerate": "1.11.0", "transformers": "4.56.2",
            **lightning("2.5.0"),
        },
    ),
    Row(
        "Axolotl, ms-swift",
        {
            "torch": "2.12.1", "deepspeed": "0.18.9", "accelerate": "1.13.0", "transformers": "4.57.6",
            **lightning("2.5.6"),
        },
    ),
    Row("OpenRLHF", {"deepspeed": "0.19.5", "accelerate": "1.14.0"}),
    Row("newest", fresh=True),
    Row("Python 3.10", {"deepspeed": "0.18.4"}, python="3.10"),
    Row("Python 3.12", python="3.12"),
    Row("Python 3.13", python="3.13"),
    # The oldest of all, as far as they go over the tested torch. A part of its tests runs in CI.
    Row("oldest", {"deepspeed": "0.18.4", "accelerate": "1.11.0", **lightning("2.5.0")}),
    *(Row(f"DeepSpeed {release}", {"deepspeed": release}, tests=tuple(RELEASE)) for release in _BY_RELEASE),
]  # fmt: skip

# A few minutes of the oldest row: one seed range of random programs per stage, and each framework once.
SMOKE = (
    "tests/core/test_releases.py",
    "tests/core/test_random_programs.py::test_random_programs",
    "tests/core/test_attach.py::test_optimizer_offloaded_to_the_cpu",
    "tests/lightning/test_manual.py",
    "tests/fabric/test_training.py",
    "tests/accelerate/test_plugin.py",
)
