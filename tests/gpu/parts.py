"""What GPUs have to show, ordered by what it would teach: the parts of `make gpu`. Data alone."""

from dataclasses import dataclass

# What an argument of a command stands for: the file to which it writes what it has measured.
MEASURED = "{measured}"
# And the number of GPUs.
GPUS = "{gpus}"


@dataclass(frozen=True)
class Part:
    """One part of `make gpu`.

    Attributes:
        name: also that of its file.
        teaches: the question that it answers.
        seconds: after which it is ended, on one GPU.
        command: arguments of Python.
        dry: those without a GPU; or in words, why the part has no meaning there.
        dry_seconds: after which it is ended there; a CPU is slower.
        needs: GPUs; with fewer it is skipped.
    """

    name: str
    teaches: str
    seconds: int
    command: tuple[str, ...]
    dry: tuple[str, ...] | str
    dry_seconds: int = 1200
    needs: int = 1

    def limit(self, gpus: int) -> float:
        """Seconds on so many GPUs: their ranks share the host's processors, and start one another's collectives."""
        return self.seconds * (1 + (gpus - 1) / 4)


def tests(*arguments: str, workers: int = 0) -> tuple[str, ...]:
    """Pytest, with what its tests record in MEASURED."""
    parallel = ("-n", str(workers)) if workers else ()
    report = ("-o", "junit_family=xunit1", "--junitxml", MEASURED)
    return ("-m", "pytest", "-q", "-p", "no:cacheprovider", *report, *parallel, *arguments)


def exposed(*arguments: str) -> tuple[str, ...]:
    """`benchmarks/exposed.py` as rank 0 of 64, whose collectives are delays."""
    return ("-W", "ignore", "benchmarks/exposed.py", "--output", MEASURED, *arguments)


def between(*arguments: str, ranks: str = GPUS) -> tuple[str, ...]:
    """The same with NCCL between all GPUs."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks)
    return (*launch, "benchmarks/exposed.py", "--output", MEASURED, *arguments)


# Without the command, whose packages may not be there.
DOCTOR = """
import json, sys
from zerosync_strategy.tools.doctor.ranks import check_gpus
found = [vars(finding) for finding in check_gpus(int(sys.argv[2]))]
print(*found, sep="\\n")
json.dump(found, open(sys.argv[1], "w"))
sys.exit(any(finding["level"] == "error" for finding in found))
"""
TINY = ("--cpu", "--rounds", "1", "--steps", "1", "--layers", "2", "--width", "64", "--context", "16", "--batch", "2")
MOST = ("ddp", "fsdp2-3", "stock-2", "coalesced-2", "stock-3", "zerosync-2", "zerosync-3")
SHORT = ("--rounds", "2", "--steps", "2")
GPT = ("--model", "gpt", "--layers", "24", "--width", "1024", *SHORT)
SMALL = (
    *("--model", "gpt", "--layers", "24", "--width", "128", "--context", "32", "--batch", "1"),
    *("--gbits", "1e9", "--latency", "0", *SHORT),
)


PARTS = (
    Part(
        "recorder",
        "Which of torch's flight recorders sees NCCL's collectives?",
        30,
        tests("tests/gpu/test_recorder.py"),
        tests("tests/gpu/test_recorder.py", "--simulated"),
    ),
    Part(
        "exact",
        "Are stages 1 to 3 plain torch in fp32, bf16 and fp16, on the device, offloaded and on the host?",
        110,
        tests("tests/gpu/test_exact.py", workers=8),
        tests("tests/gpu/test_exact.py", "--simulated", workers=2),
    ),
    Part(
        "between",
        "Is training plain torch's over NCCL between ranks: with each option, resumed, attached again?",
        150,
        tests("tests/gpu/test_between.py", workers=4),
        tests("tests/gpu/test_between.py", "--simulated", workers=2),
        needs=2,
    ),
    Part(
        "faults",
        "Is a rank that raises, is killed, is stopped, is out of memory or runs another module named by each other?",
        120,
        tests("tests/gpu/test_faults.py", workers=5),
        tests("tests/gpu/test_faults.py", "--simulated", workers=2),
        needs=2,
    ),
    Part(
        "frameworks",
        "The same under Lightning's Trainer, Fabric and Accelerate.",
        90,
        tests("tests/gpu/test_frameworks.py", workers=3),
        tests("tests/gpu/test_frameworks.py", "--simulated", workers=2),
        needs=2,
    ),
    Part(
        "doctor",
        "What does `zerosync doctor --gpus` say?",
        200,
        ("-c", DOCTOR, MEASURED, GPUS),
        "tests/doctor/test_gpus.py runs it on the simulated device",
        needs=2,
    ),
    Part(
        "nccl",
        "How much of NCCL's communication between these GPUs does a step expose?",
        120,
        between("--model", "mlp", *SHORT, "--systems", "ddp", "fsdp2-3", "stock-3", "zerosync-2", "zerosync-3"),
        between("--model", "mlp", *TINY, ranks="2"),
        needs=2,
    ),
    Part(
        "streams",
        "Does each rule of docs/streams.md matter on real streams, which are kept busy and poisoned?",
        95,
        tests("tests/gpu/test_streams.py"),
        tests("tests/racecheck/test_deepspeed.py", "--extended=all", "-k", "every_rule_is_needed", workers=2),
    ),
    Part(
        "costs",
        "What is a step's peak of memory, and at which lines does the host wait?",
        45,
        tests("tests/gpu/test_step_costs.py", workers=4),
        tests("tests/gpu/test_step_costs.py", "--simulated", workers=2),
    ),
    Part(
        "rest",
        "What else tests/gpu has: gauges, pinned memory, edits, compiled regions, slow gathers.",
        75,
        tests("tests/gpu", "-k", "(test_cuda or test_memory or test_gathers) and not deepcompile", workers=4),
        "CUDA's allocator, compiled kernels and events are what these tests are about",
    ),
    Part(
        "followed",
        "Does the race checker follow CUDA's own events, and find what is not ordered?",
        40,
        tests("tests/gpu/test_followed.py", workers=4),
        tests("tests/gpu/test_followed.py", "--simulated"),
    ),
    Part(
        "exposed",
        "How much communication of 64 ranks does a step expose, at the shape of DeepSpeed's pull request 7992?",
        95,
        exposed("--model", "mlp", "--systems", *MOST),
        exposed("--model", "mlp", *TINY),
    ),
    Part(
        "gpt",
        "The same of a GPT of 0.3 G parameters.",
        85,
        exposed(*GPT, "--systems", "ddp", "fsdp2-3", "zerosync-2", "zerosync-3"),
        exposed("--model", "gpt", *TINY),
    ),
    Part(
        "host",
        "How long does the host take for a step? The same with hardly any arithmetic, and links that take no time.",
        55,
        exposed(*SMALL, "--systems", "ddp", "fsdp2-3", "zerosync-2", "zerosync-3-resharding"),
        "a CPU has no kernels to launch; benchmarks/host_work.py counts there",
    ),
    Part(
        "deepcompile",
        "Is DeepCompile plain torch? It builds DeepSpeed's extension with nvcc.",
        150,
        tests("tests/gpu/test_cuda.py", "-k", "deepcompile", "-x", workers=4),
        tests("tests/core/test_deepcompile.py", "-k", "equal_to_plain_torch", workers=2),
    ),
)
