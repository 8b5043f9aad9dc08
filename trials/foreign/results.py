"""One line of JSON per foreign test, for tables."""

import collections
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.harness.ranks import RanksError

FILE = "FOREIGN_RESULTS"  # names the file; without it nothing is written
TIMEOUT = float(os.environ.get("FOREIGN_TIMEOUT", "60"))


def record(test: str, arm: str, outcome: str, error: str = "", **facts: Any) -> None:
    entry = {"test": test, "arm": arm, "outcome": outcome, "error": error[:4000], **facts}
    if FILE in os.environ:
        with Path(os.environ[FILE]).open("a") as lines:
            lines.write(json.dumps(entry) + "\n")


def first_error(error: RanksError) -> tuple[str, str]:
    """The name and the text of what the first rank raised that did not wait for another one in vain."""
    failed = [rank for rank in error.outcomes if rank.error not in (None, "RankKilled")] or error.outcomes
    first = min(failed, key=lambda rank: rank.ended_at)
    return first.error or "", f"{first.error}: {first.message}\n{first.traceback[-2500:]}"


def read(files: list[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """By test and arm; a test that was run again counts as it went last."""
    found: dict[str, dict[str, dict[str, Any]]] = collections.defaultdict(dict)
    for file in files:
        for line in Path(file).read_text().splitlines():
            entry = json.loads(line)
            found[entry["test"]][entry["arm"]] = entry
    return found


def differing(tests: dict[str, dict[str, dict[str, Any]]], plain: str = "ddp") -> tuple[int, list[str]]:
    """How many passed in the arm ``plain`` and in another, with parameters to compare; which left other ones there."""
    compared, found = 0, []
    for test, entries in sorted(tests.items()):
        expected = entries.get(plain, {})
        for arm, entry in entries.items():
            outcomes = {entry["outcome"], expected.get("outcome")}
            if arm == plain or outcomes != {"passed"} or not any(entry.get("weights") or ()):
                continue
            compared += 1
            pairs = zip(_flat(entry["weights"]), _flat(expected["weights"]), strict=False)
            if len(_flat(entry["weights"])) != len(_flat(expected["weights"])) or any(
                abs(ours - theirs) > 1e-4 * max(1, abs(theirs)) for ours, theirs in pairs
            ):
                found.append(f"{test} {arm}: {entry['weights']}, {plain}: {expected['weights']}")
    return compared, found


def _flat(nested: Any) -> list[float]:
    return [number for each in nested for number in _flat(each)] if isinstance(nested, list) else [nested]


def main() -> None:
    tests = read(sys.argv[1:])
    arms = sorted({arm for entries in tests.values() for arm in entries})
    for arm in arms:
        entries = [entries[arm] for entries in tests.values() if arm in entries]
        print(arm, dict(collections.Counter(entry["outcome"] for entry in entries)))
    compared, other = differing(tests)
    print(f"parameters compared with ddp: {compared}, differing: {len(other)}", *other, sep="\n    ")
    for test, entries in sorted(tests.items()):
        if any(entry["outcome"] in ("failed", "timed out") for entry in entries.values()):
            print(test)
            for arm, entry in sorted(entries.items()):
                print(f"    {arm}: {entry['outcome']} {entry['error'].splitlines()[0][:180] if entry['error'] else ''}")


if __name__ == "__main__":
    main()
