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


def main() -> None:
    tests = read(sys.argv[1:])
    arms = sorted({arm for entries in tests.values() for arm in entries})
    for arm in arms:
        entries = [entries[arm] for entries in tests.values() if arm in entries]
        print(arm, dict(collections.Counter(entry["outcome"] for entry in entries)))
    for test, entries in sorted(tests.items()):
        if any(entry["outcome"] in ("failed", "timed out") for entry in entries.values()):
            print(test)
            for arm, entry in sorted(entries.items()):
                print(f"    {arm}: {entry['outcome']} {entry['error'].splitlines()[0][:180] if entry['error'] else ''}")


if __name__ == "__main__":
    main()
