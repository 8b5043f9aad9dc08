"""The training programs that are compared. They use public names only, so that they run with any revision."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zerosync_strategy
from tests.equality.recorder import Recorder, digest
from zerosync_strategy import ZeroSyncPlugin, ZeroSyncStrategy, attach, shard_over

STEPS, BACKWARDS, SAMPLES, WIDTH = 3, 3, 4, 16
ZERO = {
    "reduce_bucket_size": 500, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 500,
}  # fmt: skip
CPU_OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


@dataclass(frozen=True)
class Program:
    run: Callable[[Recorder], None]
    ranks: int = 2


class Side(nn.Linear):
    def forward(self, x: torch.Tensor, aside: bool = False) -> torch.Tensor:
        """With `aside`, the weight gets no gradient, though the module runs, as ZeRO-3 needs it on every rank."""
        return F.linear(x, self.weight.detach() if aside else self.weight, self.bias)


class Net(nn.Module):
    def __init__(self, hidden: int = 24) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.side, self.last = nn.Linear(WIDTH, hidden), Side(hidden, hidden), nn.Linear(hidden, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, aside: bool = False) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = x + self.side(x, aside)
        return (self.last(x) * self.scale).float().square().mean()


class Reads(Net):
    """Reads a parameter where no hook of its module gathers it: before its module runs, and after."""

    def forward(self, x: torch.Tensor, aside: bool = False) -> torch.Tensor:
        ahead = F.linear(torch.tanh(x), self.first.weight)
        return super().forward(x, aside) + F.linear(ahead, self.side.weight, self.side.bias).square().mean()


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.side.requires_grad_(False)


# ---- plain DeepSpeed -------------------------------------------------------------------------------------------------


def rank() -> int:
    return int(os.environ["RANK"])


def data(k: int) -> torch.Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(10 * k + rank()))


def start() -> None:
    prepare_cpu = getattr(zerosync_strategy, "prepare_cpu", None)
    if prepare_cpu is None:  # before it was public
        from zerosync_strategy.core.engine.compat import prepare_cpu
    prepare_cpu()
    deepspeed.init_distributed("gloo", dist_init_required=not dist.is_initialized(), verbose=False)


def make_engine(module: nn.Module, stage: int, zero: dict[str, Any] | None = None, **config: Any) -> Any:
    start()
    trained = [param for param in module.parameters() if param.requires_grad]
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0,
        "zero_force_ds_cpu_optimizer": False, "zero_optimization": {"stage": stage, **ZERO, **(zero or {})}, **config,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=torch.optim.AdamW(trained, lr=0.02), config=config, dist_init_required=False
    )
    return engine


def forward(recorder: Recorder, engine: Any, k: int, aside: bool = False) -> torch.Tensor:
    """The loss of micro-batch `k`."""
    return recorder.loss(engine(data(k).to(engine.get_data_types()[0]), aside) / BACKWARDS)


def train(recorder: Recorder, engine: Any, zerosync: Any, first: int = 0, last: int = STEPS) -> None:
    """Optimizer steps `first` to `last`, of several backwards each."""
    for step in range(first, last):
        for k in range(step * BACKWARDS, (step + 1) * BACKWARDS):
            engine.backward(forward(recorder, engine, k))
        engine.step()
        recorder.step(zerosync)


def step_every_time(recorder: Recorder, engine: Any, zerosync: Any) -> None:
    for k in range(STEPS * BACKWARDS):
        engine.backward(forward(recorder, engine, k))
        engine.step()  # DeepSpeed counts, and steps on the last
        recorder.step(zerosync)


def clip(recorder: Recorder, engine: Any, zerosync: Any) -> None:
    for step in range(STEPS):
        for k in range(BACKWARDS):
            engine.backward(forward(recorder, engine, step * BACKWARDS + k))
        norm = zerosync.gradient_norm()
        if step == 1:
            zerosync.clip_next_step(0.01)
        engine.step()
        recorder.step(zerosync, norm)


def skip_on_one_rank(recorder: Recorder, engine: Any, zerosync: Any) -> None:
    for step in range(STEPS):
        for k in range(BACKWARDS):
            engine.backward(forward(recorder, engine, step * BACKWARDS + k, aside=rank() == 1 and step != 1))
        engine.step()
        recorder.step(zerosync)


def drop(recorder: Recorder, engine: Any, zerosync: Any) -> None:
    """An aborted window, and one whose first gradients are zeroed."""
    engine.backward(forward(recorder, engine, 0))
    zerosync.abort()
    train(recorder, engine, zerosync, 0, 1)
    engine.backward(forward(recorder, engine, 1))
    engine.zero_grad()
    train(recorder, engine, zerosync, 1, 2)
    engine.backward(forward(recorder, engine, 2))
    zerosync.reduce()
    engine.optimizer.zero_grad()
    train(recorder, engine, zerosync, 2, 3)


def in_other_ways(recorder: Recorder, engine: Any, zerosync: Any) -> None:
    """Backwards of the loss, under `no_sync`, of two forwards, and the announced last one; an evaluation between."""
    for step in range(STEPS):
        forward(recorder, engine, 10 * step).backward()
        with engine.no_sync():
            engine.backward(forward(recorder, engine, 10 * step + 1))
        engine.eval()
        with torch.no_grad():
            forward(recorder, engine, 10 * step + 2)
        engine.train()
        if step == 1:
            zerosync.window.expect_last()
        engine.backward(forward(recorder, engine, 10 * step + 3) + forward(recorder, engine, 10 * step + 4))
        engine.step()
        recorder.step(zerosync)


def detach(recorder: Recorder, engine: Any, zerosync: Any) -> None:
    train(recorder, engine, zerosync, 0, 2)
    zerosync.detach()
    for k in range(10, 12):  # by DeepSpeed alone
        engine.backward(forward(recorder, engine, k))
        engine.step()


def restore(recorder: Recorder, engine: Any, zerosync: Any) -> None:
    train(recorder, engine, zerosync, 0, 1)
    state = zerosync.full_state()
    for name, param in sorted(state.items()):
        recorder.note(f"full_state {name}", digest(param))
    train(recorder, engine, zerosync, 1, 2)
    zerosync.load_full_state(state)
    train(recorder, engine, zerosync, 2, 3)


def compiled(recorder: Recorder, engine: Any, zerosync: Any) -> None:
    engine.compile(backend="eager")
    train(recorder, engine, zerosync)


def one_engine(
    recorder: Recorder, stage: int, how: Callable[[Recorder, Any, Any], None] = train,
    module: Callable[[], nn.Module] = Net, options: dict[str, Any] | None = None, **config: Any,
) -> None:  # fmt: skip
    engine = make_engine(module(), stage, **config)
    how(recorder, engine, attach(engine, **(options or {})))
    recorder.end(engine.module)


def two_engines(recorder: Recorder, stage: int) -> None:
    """The second one steps once in two backwards, while the window of the first is open."""
    modules = nn.ModuleDict({"a": Net(), "b": Reads() if stage == 3 else Net()})
    engines = [make_engine(module, stage) for module in modules.values()]
    handles = [attach(engine) for engine in engines]
    for k in range(12):
        for engine, zerosync, every, name in zip(engines, handles, (3, 2), "ab", strict=True):
            engine.backward(forward(recorder, engine, k))
            if k % every == every - 1:
                engine.step()
                recorder.step(zerosync, engine=name)
    recorder.end(modules)


def two_groups(recorder: Recorder, stage: int, **options: Any) -> None:
    """Ranks 0 and 1 have one layer of their own, and ranks 2 and 3 have theirs."""
    start()
    groups, module = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])], Net()
    torch.manual_seed(rank() // 2)
    module.side.reset_parameters()
    shard_over(groups[rank() // 2], module.side)
    engine = make_engine(module, stage)
    clip(recorder, engine, attach(engine, **options))
    recorder.end(engine.module)


# ---- Lightning -------------------------------------------------------------------------------------------------------


class Automatic(LightningModule):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.net, self.recorder = Net(), recorder

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.recorder.loss(self.net(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Manual(Automatic):
    """Two optimizers, of which one trains a net through the other's, which is toggled off."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self.automatic_optimization = False
        torch.manual_seed(4)
        self.front = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        front, net = self.optimizers()
        with self.toggled_optimizer(front):
            self.manual_backward(self.recorder.loss(-self.net(self.front(batch[0]))))
        with self.toggled_optimizer(net):
            self.manual_backward(self.recorder.loss(self.net(self.front(batch[0]).detach())))
        for optimizer, every in ((net, 2), (front, 4)):
            if batch_idx % every == every - 1:
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=0.02) for part in (self.front, self.net)]


class Records(Callback):
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        for index, zerosync in enumerate(trainer.strategy.zerosyncs):
            self.recorder.step(zerosync, engine=f"optimizer {index}:")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.recorder.end(pl_module)


def lightning(recorder: Recorder, stage: int, module: type[Automatic] = Automatic, **options: Any) -> None:
    zero = {"stage": stage, **ZERO}
    trainer = Trainer(
        strategy=ZeroSyncStrategy(config={"zero_optimization": zero, "zero_allow_untested_optimizer": True}),
        callbacks=[Records(recorder)], accelerator="cpu", devices=2, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, **options,
    )  # fmt: skip
    trainer.fit(module(recorder), DataLoader(TensorDataset(torch.cat([data(k) for k in range(8)])), SAMPLES))


# ---- Accelerate ------------------------------------------------------------------------------------------------------


def accelerate(recorder: Recorder, stage: int, step_on: str = "optimizer") -> None:
    config = {"zero_optimization": {"stage": stage, **ZERO}, "gradient_clipping": 0.05}
    plugin = ZeroSyncPlugin(hf_ds_config=config, step_on=step_on)
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=BACKWARDS)
    module = Net()
    samples = torch.randn(2 * 8 * SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    model, optimizer, loader = accelerator.prepare(
        module, torch.optim.AdamW(module.parameters(), lr=0.02), DataLoader(TensorDataset(samples), SAMPLES)
    )
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(recorder.loss(model(x)))
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.05) if accelerator.sync_gradients else None
            optimizer.step()
            optimizer.zero_grad()
        recorder.step(accelerator.deepspeed_engine_wrapped.zerosync, norm)
    recorder.end(accelerator.unwrap_model(model))


# ---- all of them -----------------------------------------------------------------------------------------------------

PROGRAMS: dict[str, Program] = {}


def add(
    name: str, stages: tuple[int, ...], run: Callable[..., None] = one_engine, ranks: int = 2, **arguments: Any
) -> None:  # fmt: skip
    for stage in stages:
        PROGRAMS[f"{name}, stage {stage}"] = Program(partial(run, stage=stage, **arguments), ranks)


BF16 = {"bf16": {"enabled": True}}

add("coalesced", (1, 2, 3))
add("on one rank", (2, 3), ranks=1)
add("on four ranks", (2, 3), ranks=4, how=clip)
add("in several chunks", (2, 3), module=partial(Net, hidden=1300))
add("coalesce=False", (1, 2, 3), options={"coalesce": False})
add("grad_memory_budget of a part", (1, 2, 3), options={"grad_memory_budget": 2500})
add("grad_memory_budget=0", (2, 3), options={"grad_memory_budget": 0})
add("overlap_last", (1, 2, 3), how=step_every_time, gradient_accumulation_steps=BACKWARDS)
add(
    "overlap_last=False", (2, 3), how=step_every_time, gradient_accumulation_steps=BACKWARDS,
    options={"overlap_last": False},
)  # fmt: skip
add("ordered", (2, 3), options={"reduction": "ordered"})
add("bf16", (1, 2, 3), **BF16)
add("bf16 accumulated in fp32", (2, 3), **BF16, data_types={"grad_accum_dtype": "fp32"})
add("clipped, norm asked for", (1, 2, 3), how=clip, gradient_clipping=0.05)
add("param_memory_budget=all", (3,), options={"param_memory_budget": "all"})
add("param_memory_budget of a part", (3,), options={"param_memory_budget": 2500})
add("persistent parameters", (3,), zero={"stage3_param_persistence_threshold": 100})
add("read outside of its module", (3,), module=Reads)
add("compiled", (3,), how=compiled, module=Reads)
add("optimizer offloaded", (2, 3), how=clip, zero=CPU_OFFLOAD)
add("frozen parameters", (1, 2, 3), module=Frozen)
add("unused on one rank", (1, 2, 3), how=skip_on_one_rank)
add("abort, zero_grad", (1, 2, 3), how=drop)
add("raw backward, no_sync, evaluation", (2, 3), how=in_other_ways)
add("detached", (1, 2, 3), how=detach)
add("full_state", (3,), how=restore)
add("two engines", (2, 3), two_engines)
add("two groups of ranks", (3,), two_groups, ranks=4)
add("two groups of ranks, held", (3,), two_groups, ranks=4, param_memory_budget="all")
add("Lightning, automatic", (2, 3), lightning, accumulate_grad_batches=BACKWARDS, gradient_clip_val=0.05)
add("Lightning, two optimizers", (2, 3), lightning, module=Manual)
add("Accelerate", (2, 3), accelerate)
add("Accelerate, step_on=backward", (2,), accelerate, step_on="backward")
