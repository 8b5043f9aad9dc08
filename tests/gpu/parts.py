"""What one GPU has to show, ordered by what it would teach: the parts of `make gpu`. Data alone."""

from dataclasses import dataclass

# What an argument of a command stands for: the file to which it writes what it has measured.
MEASURED = "{measured}"


@dataclass(frozen=True)
class Part:
    """One part of `make gpu`.

    Attributes:
        name: also that of its file.
        teaches: the question that it answers.
        seconds: after which it is ended.
        command: arguments of Python.
        dry: those without a GPU; or in words, why the part has no meaning there.
        dry_seconds: after which it is ended there; a CPU is slower.
    """

    name: str
    teaches: str
    seconds: int
    command: tuple[str, ...]
    dry: tuple[str, ...] | str
    dry_seconds: int = 1200


def tests(*arguments: str, workers: int = 0) -> tuple[str, ...]:
    """Pytest, with what its tests record in MEASURED."""
    parallel = ("-n", str(workers)) if workers else ()
    report = ("-o", "junit_family=xunit1", "--junitxml", MEASURED)
    return ("-m", "pytest", "-q", "-p", "no:cacheprovider", *report, *parallel, *arguments)


def exposed(*arguments: str) -> tuple[str, ...]:
    """`benchmarks/exposed.py` as rank 0 of 64, whose collectives are delays."""
    return ("-W", "ignore", "benchmarks/exposed.py", "--output", MEASURED, *arguments)


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
        80,
        tests("tests/gpu/test_exact.py", workers=8),
        tests("tests/gpu/test_exact.py", "--simulated", workers=2),
    ),
    Part(
        "streams",
        "Does each rule of docs/streams.md matter on real streams, which are kept busy and poisoned?",
        80,
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
        65,
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
        65,
        exposed("--model", "mlp", "--systems", *MOST),
        exposed("--model", "mlp", *TINY),
    ),
    Part(
        "gpt",
        "The same of a GPT of 0.3 G parameters.",
        60,
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
        80,
        tests("tests/gpu/test_cuda.py", "-k", "deepcompile", "-x", workers=4),
        tests("tests/core/test_deepcompile.py", "-k", "equal_to_plain_torch", workers=2),
    ),
)
