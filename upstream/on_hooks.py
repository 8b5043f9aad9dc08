"""ZeroSync on the hooks of the patches for DeepSpeed, in place of its overrides: are the parameters the same?

    torchrun --nproc_per_node 2 upstream/on_hooks.py  # with a DeepSpeed that has the three patches

What ``replaced.py`` names is taken out of the package, by raising where it is reached, before an engine is attached.
For each stage, with and without an offloaded optimizer, the parameters after three steps must be those of ZeroSync as
it is, bit for bit, and near those of plain torch in one process.
"""

import contextlib
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from replaced import REPLACED
from torch.nn.functional import mse_loss
from torch.optim import Adafactor, AdamW

from zerosync_strategy import attach, prepare_cpu
from zerosync_strategy.core.attached.engine import AttachedEngine
from zerosync_strategy.core.attached.stage3 import Stage3Engine
from zerosync_strategy.core.attached.whole import WholeEngine
from zerosync_strategy.core.engine import gathering, zero, zero3, zero3_optimizer, zero12
from zerosync_strategy.core.gradients import stage3 as gradients3
from zerosync_strategy.core.gradients.owned_stage3 import OwnedStage3Reducer

STEPS, BACKWARDS = 3, 4


class Hooks:
    """What the three hooks call: the parts of an attached engine, as its overrides call them."""

    def __init__(self, attached: AttachedEngine) -> None:
        self._attached = attached
        self.backward_begins = attached.backward_begins
        self.gradient_ready = attached.gradient_ready
        self.grad_norm = attached.reducer.norm
        self.gradients_dropped = attached.zero_grad
        self._begin_step = attached.window.begin_step
        self.calls: set[str] = set()

    def reduce(self) -> None:
        """Reduce inside of DeepSpeed's step, where the hook is, not around it as the override does."""
        self.calls.add("reduce")
        self._begin_step()

    def gather(self) -> None:
        self.calls.add("gather")
        attached: Any = self._attached
        attached.reducer.gather_parameters(attached.arriving.launched if attached.config.overlap_gather else None)

    @contextlib.contextmanager
    def around_step(self) -> Iterator[None]:
        self.calls.add("around_step")
        attached: Any = self._attached
        attached.window.begin_step = lambda: None
        is_stage_3 = zero.stage(attached.engine) == 3
        with attached.step(), contextlib.nullcontext() if is_stage_3 else attached.gather_parameters():
            yield

    def step_group(self, index: int) -> bool:
        attached: Any = self._attached
        if not isinstance(attached, WholeEngine):
            return isinstance(attached, Stage3Engine) and attached.step_jointly(index)
        self.calls.add("step_group")
        attached.frozen.step_group(index)
        return True


class GatherHooks:
    """What the coordinator's hook calls."""

    def __init__(self, parameters: Any) -> None:
        self._cache, self._scheduler = parameters.cache, parameters.scheduler
        self.calls: set[str] = set()

    def module_begins(self, module: Any, forward: bool) -> None:
        self.calls.add("module_begins")
        self._cache.fetching(module)
        self._scheduler.module_begins(module, forward)

    def module_fetched(self, module: Any) -> None:
        self._scheduler.module_fetched(module)

    def module_ends(self, module: Any) -> None:
        self._scheduler.module_ends(module)

    def gather(self, params: Any, gather_now: Callable[[Any], None]) -> None:
        self.calls.add("gather")
        self._scheduler.issue(params, gather_now)

    def keeps(self, param: Any) -> bool:
        return bool(self._cache.release(param))

    def trace_invalidated(self) -> None:
        self._cache.release_memo.cache_clear()


def gone(*_: Any, **__: Any) -> Any:
    """In place of an accessor that a hook replaces."""
    raise AssertionError("an accessor that a hook replaces was called")


@contextlib.contextmanager
def on_hooks() -> Iterator[None]:
    """While active, engines are attached by hooks, and what they replace is not there."""
    undo: list[Callable[[], None]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        found = vars(owner).get(name)
        undo.append(lambda: setattr(owner, name, found))
        setattr(owner, name, value)

    of_deepspeed = [places for patch, places in REPLACED.items() if patch.startswith("deepspeed")]
    for place in itertools.chain(*of_deepspeed):
        path, _, name = place.partition(":")
        owner = importlib.import_module("zerosync_strategy." + path.removesuffix(".py").replace("/", "."))
        *classes, last = name.split(".")
        for each in classes:
            owner = getattr(owner, each)
        if classes:
            found = vars(owner)[last]
            delattr(owner, last)
            undo.append(lambda owner=owner, last=last, found=found: setattr(owner, last, found))
        else:
            put(owner, last, gone)

    put(zero12, "give_gradient_shard", lambda optimizer, index, flat: None)
    put(zero12, "gradient_shard", lambda optimizer, index: optimizer.gradient_shards()[index])
    put(zero12, "discard_gradient_shard", lambda optimizer, index: None)
    put(zero12, "hand_over_gradients", lambda optimizer: None)
    put(zero12, "parameter_gather", lambda optimizer, gather: contextlib.nullcontext())
    put(zero3_optimizer, "gradient_shards", shards_of_stage_3)
    put(zero3_optimizer, "hand_over_gradients", lambda *_, **__: None)
    put(zero3_optimizer, "give_gradients", lambda *_: None)
    put(zero3_optimizer, "discard_gradients", lambda optimizer: None)
    put(zero3_optimizer, "norm_of_shards", norm_of_stage_3)
    put(gradients3.Stage3Reducer, "_computes_norm", property(lambda self: True))
    put(gathering, "fetch", fetch)
    begin = AttachedEngine.begin

    def begin_on_hooks(self: Any, *layers: Any) -> None:
        begin(self, *layers)
        optimizer = self.engine.optimizer
        optimizer.gradient_reducer = optimizer.parameter_gatherer = optimizer.step_hook = Hooks(self)
        if zero.stage(self.engine) == 3:
            gathering.coordinator(optimizer).gather_hook = GatherHooks(self._parameters)

    put(AttachedEngine, "begin", begin_on_hooks)
    try:
        yield
    finally:
        for each in reversed(undo):
            each()


def shards_of_stage_3(optimizer: Any) -> dict[int, torch.Tensor]:
    found = {}
    for group, flat in zip(optimizer.fp16_groups, optimizer.gradient_shards(), strict=True):
        parts = flat.split([zero3.shard_numel(param) for param in group])
        found |= {zero3.param_id(param): part for param, part in zip(group, parts, strict=True)}
    return found


def norm_of_stage_3(optimizer: Any) -> torch.Tensor:
    reducer = optimizer._zerosync_attached.reducer
    owned = isinstance(reducer, OwnedStage3Reducer)
    square = zero.sum_of_squares(list(reducer.shards.values()) if owned else optimizer.gradient_shards())
    dist.all_reduce(square, group=zero.data_parallel_group(optimizer))
    return square.sqrt().float()


def fetch(coordinator: Any, params: list[Any]) -> list[Any]:
    coordinator.gather_now(params, True)
    gathering.count_gathered(coordinator, params, -1)
    found = [handle for handle, _ in gathering.handles(coordinator, params)]
    for param in params:
        del gathering.in_flight(coordinator)[param]
    return found


def network() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(12, 40), torch.nn.Tanh(), torch.nn.Linear(40, 12), torch.nn.Linear(12, 5)
    )


def batch(step: int, backward: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * backward + rank)
    return torch.randn(6, 12, generator=generator), torch.randn(6, 5, generator=generator)


def train(
    kind: type[torch.optim.Optimizer], stage: int, offload: bool, options: dict[str, Any]
) -> tuple[list[torch.Tensor], set[str]]:
    module = network()
    optimizer = kind(module.parameters(), lr=0.02)
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_clipping": 0.5,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage, "reduce_bucket_size": 300, "stage3_param_persistence_threshold": 0,
            **({"offload_optimizer": {"device": "cpu"}} if offload else {}),
        },
        "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    zerosync = attach(engine, **options)
    for step in range(STEPS):
        for backward in range(BACKWARDS):
            x, y = batch(step, backward, dist.get_rank())
            loss = mse_loss(engine(x), y) / BACKWARDS
            if backward % 2:
                loss.backward()
            else:
                engine.backward(loss)
        engine.step()
    with zerosync.full_parameters():
        found = [param.detach().clone() for param in module.parameters()]
    optimizer, calls = engine.optimizer, set()
    if optimizer.step_hook is not None:
        calls |= optimizer.step_hook.calls
        optimizer.gradient_reducer = optimizer.parameter_gatherer = optimizer.step_hook = None
        if stage == 3:
            coordinator = gathering.coordinator(optimizer)
            calls |= {f"coordinator.{name}" for name in coordinator.gather_hook.calls}
            coordinator.gather_hook = None
    engine.destroy()
    return found, calls


def oracle(kind: type[torch.optim.Optimizer]) -> list[torch.Tensor]:
    module = network()
    optimizer = kind(module.parameters(), lr=0.02)
    for step in range(STEPS):
        optimizer.zero_grad()
        for backward in range(BACKWARDS):
            for rank in range(dist.get_world_size()):
                x, y = batch(step, backward, rank)
                (mse_loss(module(x), y) / BACKWARDS / dist.get_world_size()).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
    return [param.detach() for param in module.parameters()]


def main() -> None:
    if not hasattr(ZeROOptimizer, "gradient_reducer") or not hasattr(ZeROOptimizer, "step_hook"):
        raise SystemExit("this DeepSpeed has no hooks: apply the three patches for it")
    prepare_cpu()
    deepspeed.init_distributed("gloo")
    elementwise = itertools.product([AdamW], (1, 2, 3), (False, True), ({}, {"coalesce": False}))
    of_matrices = itertools.product([Adafactor], (1, 2, 3), [False], [{}])
    for kind, stage, offload, options in itertools.chain(elementwise, of_matrices):
        overridden, _ = train(kind, stage, offload, options)
        with on_hooks():
            hooked, calls = train(kind, stage, offload, options)
        same = all(map(torch.equal, overridden, hooked))
        error = max((a - b).abs().max().item() for a, b in zip(hooked, oracle(kind), strict=True))
        if dist.get_rank() == 0:
            print(
                f"{kind.__name__}, stage {stage}, offload {offload}, {options}: the same bits {same}, off plain torch"
                f" {error:.1e}, called {', '.join(sorted(calls))}", flush=True,
            )  # fmt: skip
        if not same or error > 1e-4 or not calls:
            sys.exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
