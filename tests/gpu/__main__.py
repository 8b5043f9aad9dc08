"""What GPUs have to show, without a network: one in ten minutes, eight in half an hour.

python -m tests.gpu --out FOLDER [--dry] [--only NAME ...] [--wheels FOLDER]

Each part of `parts.py` runs in a process group of its own for as long as it may; however one ends, the next begins. It
writes FOLDER/NAME.json, its output to FOLDER/NAME.log if it did not pass, and prints a line; all lines come again last.
Where DeepSpeed is not installed, the wheels that `make gpu-wheels` has gathered are unpacked into a temporary folder.
Without a GPU, or with --dry, everything runs on the CPU and the simulated device, to be tried. Exits 1 if a part failed
or was ended.
"""

import argparse
import ast
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from tests.gpu.parts import GPUS, MEASURED, PARTS, Part

ROOT = Path(__file__).parents[2]
FINE = ("passed", "no meaning", "skipped")
GRACE = 10.0  # seconds after an interrupt, in which pytest writes down what it has
MACHINE = """
import json, platform, torch
from importlib.metadata import version
gpus = torch.cuda.device_count()
print(json.dumps({
    "gpus": gpus, "device": torch.cuda.get_device_name() if gpus else None, "python": platform.python_version(),
    "torch": torch.__version__, "cuda": torch.version.cuda, "nccl": torch.cuda.nccl.version() if gpus else None,
    "deepspeed": version("deepspeed"),
    "capability": ".".join(map(str, torch.cuda.get_device_capability())) if gpus else None,
}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu", help="for a file of each part (out/gpu)")
    parser.add_argument("--dry", action="store_true", help="on the simulated device, where there is a GPU too")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[part.name for part in PARTS], help="these parts")
    parser.add_argument("--wheels", type=Path, default=ROOT / "out" / "gpu-wheels", help="of `make gpu-wheels`")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        environment = installed(options.wheels, Path(folder))
        found = subprocess.run([sys.executable, "-c", MACHINE], env=environment, stdout=subprocess.PIPE, check=True)
        machine = json.loads(found.stdout)
        dry = options.dry or not machine["gpus"]
        if not dry:  # DeepSpeed builds its operators for that; in other lists it cannot read every name
            environment["TORCH_CUDA_ARCH_LIST"] = machine["capability"]
        words = "dry: everything on the CPU, its device simulated" if dry else "on GPUs"
        print(f"{words}. {machine}", flush=True)
        rows = []
        for part in PARTS:
            if options.only and part.name not in options.only:
                continue
            record = {"part": part.name, "teaches": part.teaches, "dry": dry, "machine": machine}
            log = options.out.resolve() / f"{part.name}.log"
            record |= run(part, 0 if dry else machine["gpus"], environment, log)
            if record["ended"] in FINE:
                log.unlink(missing_ok=True)
            (options.out / f"{part.name}.json").write_text(json.dumps(record, indent=1) + "\n")
            rows.append(line(record))
            print(rows[-1], flush=True)
    print(f"\n{options.out}:", *rows, sep="\n")
    return int(any(not any(f" {fine} " in row for fine in FINE) for row in rows))


def installed(wheels: Path, folder: Path) -> dict[str, str]:
    """The environment of the parts, in which this package and DeepSpeed can be imported."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    if subprocess.run([sys.executable, "-c", "import importlib.metadata as m; m.version('deepspeed')"],
                      env=environment, stderr=subprocess.DEVNULL).returncode == 0:  # fmt: skip
        return environment
    carried = sorted(map(str, wheels.glob("*.whl")))
    if not carried:
        sys.exit(
            f"DeepSpeed is not installed and {wheels} has no wheels. Run `make gpu-wheels` where there is a network."
        )
    install = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(folder / "site")]
    subprocess.run([sys.executable, *install, *carried], check=True)
    return environment | {"PYTHONPATH": os.pathsep.join([environment["PYTHONPATH"], str(folder / "site")])}


def run(part: Part, gpus: int, environment: dict[str, str], log: Path) -> dict[str, Any]:
    """Run a part to its end, or to that of its time, with its output in ``log``: how it ended, what it has measured.

    Without ``gpus``, it is tried on the simulated device.
    """
    dry = not gpus
    if dry and isinstance(part.dry, str):
        return {"ended": "no meaning", "why": f"no meaning without a GPU: {part.dry}"}
    if 0 < gpus < part.needs:
        return {"ended": "skipped", "why": f"needs {part.needs} GPUs, and here {'is' if gpus == 1 else 'are'} {gpus}"}
    measured = log.with_suffix(".measured")
    stands_for = {MEASURED: str(measured), GPUS: str(gpus)}
    command = [stands_for.get(each, each) for each in (part.dry if dry else part.command)]
    own = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if dry else {"ZEROSYNC_TEST_CUDA": "1"}
    limit, began = part.dry_seconds if dry else part.limit(gpus), time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environment | own, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        ended = ended_by(process, limit)
    record = {
        "ended": ended,
        "seconds": round(time.monotonic() - began, 1),
        "limit": limit,
        "command": " ".join(command),
    }
    record |= read(measured)
    measured.unlink(missing_ok=True)
    return record


def ended_by(process: subprocess.Popen[bytes], limit: float) -> str:
    """Wait for a process that leads its group, and end the group: "passed", "failed" or "out of time"."""
    try:
        return "failed" if process.wait(limit) else "passed"
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        return "out of time"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read(measured: Path) -> dict[str, Any]:
    """What a part has left: pytest's report of tests, or the JSON of a benchmark; empty where it left nothing."""
    text = measured.read_text() if measured.exists() else ""
    if not text.startswith("<"):
        return {"measured": json.loads(text)} if text else {}
    cases = list(ElementTree.fromstring(text).iter("testcase"))
    counts = {kind: sum(case.find(kind) is not None for case in cases) for kind in ("failure", "error", "skipped")}
    properties = {
        case.get("name", ""): {each.get("name", ""): value(each.get("value", "")) for each in case.iter("property")}
        for case in cases
    }
    return {
        "tests": {"run": len(cases), **counts},
        "failures": {case.get("name"): each.get("message", "")[-500:] for case in cases for each in case
                     if each.tag in ("failure", "error")},
        "measured": {name: of for name, of in properties.items() if of},
    }  # fmt: skip


def value(text: str) -> Any:
    """A number, text or container from how Python writes it."""
    with contextlib.suppress(ValueError, SyntaxError):
        return ast.literal_eval(text)
    return text


def line(record: dict[str, Any]) -> str:
    """One line on a part."""
    tests = record.get("tests")
    of_tests = ", ".join(f"{count} {kind}" for kind, count in tests.items() if count) if tests else ""
    took = f"{record['seconds']:.0f} of {record['limit']:.0f} s" if "seconds" in record else ""
    said = [took, of_tests, *record.get("failures", ()), record.get("why", "")]
    return f"{record['part']:12} {record['ended']:11} {'; '.join(filter(None, said))}"


if __name__ == "__main__":
    sys.exit(main())
