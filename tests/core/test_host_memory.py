"""Memory of the host: what a backward frees is there for the next one."""

import os
import platform
import subprocess
import sys

import pytest

from benchmarks.hosts import free_port

WIDTH, LAYERS, BACKWARDS = 1024, 8, 4
# In an interpreter of its own: glibc's thresholds depend on all that a process has freed before.
PROGRAM = f"""
import resource
import torch
from torch import nn
from tests.harness.engines import make_engine
from zerosync_strategy import attach

model = nn.Sequential(*[nn.Linear({WIDTH}, {WIDTH}) for _ in range({LAYERS})])
engine = make_engine(model, torch.optim.AdamW(model.parameters()), 2)
zerosync = attach(engine)
found = []
for _ in range(8):  # the C library learns from what is freed, in some first steps
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range({BACKWARDS}):
        engine.backward(engine(torch.ones(1, {WIDTH})).sum())
    engine.step()
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print("faults:", min(found[3:]))
"""


@pytest.mark.extended
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="for what glibc does")
def test_backwards_get_no_new_pages() -> None:
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=120,
        env=os.environ | variables | {"MASTER_PORT": str(free_port())},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    faults = int(done.stdout.rpartition("faults: ")[2])
    pages_of_gradients = 4 * WIDTH * (WIDTH + 1) * LAYERS // 4096
    assert faults < pages_of_gradients // 4, f"{BACKWARDS} backwards got {faults} pages"
