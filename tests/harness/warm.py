"""Importing this imports the heavy packages, so that the ranks that are forked from this process have them already.

This process must stay fit to be forked: no process group, no backward pass, no CUDA call here, only in ranks.
"""

import contextlib
import importlib
import os

# OpenMP reads this as torch loads. A pool of threads would not survive a fork.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch looks up the name of the peer of each connection to a store; a name server that is silent costs 5 s by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# A check through the CUDA runtime would spoil CUDA in every fork; one through NVML does not.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# DeepSpeed chooses its accelerator as it is imported.
if os.environ.get("ZEROSYNC_TEST_CUDA") != "1":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import logging
import warnings

import deepspeed
import torch
import tqdm

from tests.harness.optimizers import muon
from zerosync_strategy.core.engine import contract, deepspeed_internals, torch_internals
from zerosync_strategy.core.optimizer.probe import probe

# What would otherwise be imported anew on every rank: by deepspeed.initialize(), by frameworks, by a compilation.
LATE = """
    deepspeed.comm.mori deepspeed.compile.backend deepspeed.module_inject.auto_ep_layer
    deepspeed.runtime.superoffload.superoffload_stage3 deepspeed.runtime.zero.muon.muon_optimizer
    sympy.combinatorics sympy.tensor.tensor torch._dynamo.dce_extra_outputs torch._dynamo.repro.after_dynamo
    torch._functorch._aot_autograd.subclass_codegen torch._functorch._aot_autograd.subclass_parametrization
    torch._inductor.compile_fx torch._subclasses.schema_check_mode torch.distributed.tensor.experimental._attention
    torch.export._trace torch.fx.experimental.optimization torch.fx.experimental.validator torch.profiler._cupti_monitor
    lightning.pytorch fsspec.implementations.chained accelerate transformers.integrations
"""
for name in LATE.split():
    with contextlib.suppress(ImportError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(name)
torch._dynamo.list_backends()  # imports them
if os.environ.get("DS_ACCELERATOR") == "cpu":  # the probes of GPU operators call CUDA
    deepspeed.ops.__compatible_ops__  # noqa: B018  # probed once a process, with a compiler

for table in (*deepspeed_internals.EVERY_TABLE, *torch_internals.EVERY_TABLE):
    for internal in table:
        if internal.named_in:
            contract.names_in(internal.named_in)  # each attach() looks there, and the first of a process reads it

torch.set_num_threads(1)
probe(muon(torch.nn.Linear(2, 2, bias=False)))  # its finding is kept: a second less on each rank where bf16 is emulated
tqdm.tqdm.monitor_interval = 0  # else the first progress bar in this process starts a thread
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
