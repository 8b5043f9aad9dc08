"""Hooks see averaged gradients and may change them, as in plain torch (N1); programs without such hooks pay nothing."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.harness.extended import STAGES
from tests.harness.oracle import NORM, Oracle, backward_all, distance, full_parameters
from tests.harness.problem import backward_of, loss_of, network, oracle, sgd
from tests.harness.ranks import run_ranks
from tests.lightning.runs import Data, Module, Recorder, fit, strategy
from zerosync_strategy import ZeroSyncStrategy

BATCHES = 6
Change = Callable[[Any], None]


def halve(params: Any) -> None:
    for param in params:
        if param.grad is not None:
            param.grad *= 0.5


def clip(params: Any) -> None:
    torch.nn.utils.clip_grad_norm_(params, 0.05)


def clamp(params: Any) -> None:
    torch.nn.utils.clip_grad_value_(params, 0.01)


def remove(params: Any) -> None:
    """Of the largest parameters, which are then not stepped."""
    for param in params:
        if param.grad is not None and param.grad.numel() > 500:
            param.grad = None


def nothing(params: Any) -> None: ...


def small(stage: int, **zero: Any) -> Any:
    """Under ZeRO-3 nothing stays gathered, small as it is."""
    zero |= {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"zero_optimization": zero, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return strategy(stage, config=config)


class InModule(Module):
    """Changes gradients in one hook of the module."""

    def __init__(self, hook: str, change: Change) -> None:
        super().__init__()
        self.hook, self.change = hook, change


class AfterBackward(InModule):
    def on_after_backward(self) -> None:
        self.change(self.parameters())


class BeforeStep(InModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.change(self.parameters())


class OwnClipping(InModule):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.change(self.parameters())


class CallbackAfterBackward(Callback):
    def __init__(self, change: Change) -> None:
        self.change = change

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.change(pl_module.parameters())


class CallbackBeforeStep(CallbackAfterBackward):
    on_after_backward = Callback.on_after_backward

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.change(pl_module.parameters())


HOOKS = {
    "on_after_backward": AfterBackward,
    "on_before_optimizer_step": BeforeStep,
    "configure_gradient_clipping": OwnClipping,
    "a callback's on_after_backward": CallbackAfterBackward,
    "a callback's on_before_optimizer_step": CallbackBeforeStep,
}


def train(hook: str, change: Change, strategy_: Any, **options: Any) -> Recorder:
    cls: Any = HOOKS[hook]
    if issubclass(cls, Callback):
        module, options["callbacks"] = Module(), [cls(change)]
    else:
        module = cls(hook, change)
    return fit(module, strategy_, BATCHES, **options)[0]


def plain(change: Change, every: int = 1, after_each_backward: bool = False, clip: float = 0.0) -> Oracle:
    """DDP: the change sees the average before the step; after a backward without a step, this rank's own gradients."""
    result = oracle()
    result.optimizer.register_step_pre_hook(lambda *_: change(result.parameters))
    for batch in range(BATCHES):
        backward_of(result, batch, every)
        if (batch + 1) % every == 0:
            result.step(clip)
        elif after_each_backward:
            for rank, gradients in enumerate(result.ranks):
                for param, gradient in zip(result.parameters, gradients, strict=True):
                    param.grad = gradient
                change(result.parameters)
                result.ranks[rank] = [param.grad for param in result.parameters]
    return result


@pytest.mark.extended(but=("2-configure_gradient_clipping",))
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_change_of_gradients_takes_effect(stage: int, hook: str) -> None:
    """What writes gradients and what takes them away in each hook; what torch's own functions do, in one of a kind."""
    changes = (halve, remove, clip, clamp) if hook in ("on_after_backward", *list(HOOKS)[-1:]) else (halve, remove)

    def run() -> Any:
        found, unchanged = [], full_parameters(plain(nothing).module)
        for change in changes:
            changed = train(hook, change, small(stage)).parameters
            found.append((distance(changed, full_parameters(plain(change).module)), distance(changed, unchanged)))
        return found

    for of_rank in run_ranks(run):
        for change, (error, effect) in zip(changes, of_rank, strict=True):
            assert error == 0.0 < 1e-3 < effect, change.__name__


@pytest.mark.extended
@pytest.mark.parametrize(
    ("stage", "hook", "change"),
    [
        (1, "on_after_backward", clip),
        (2, "on_after_backward", halve),
        (3, "on_after_backward", clip),
        (1, "a callback's on_before_optimizer_step", halve),
        (2, "a callback's on_before_optimizer_step", clip),
        (3, "a callback's on_before_optimizer_step", clip),
    ],
)
def test_with_accumulation(stage: int, hook: str, change: Change) -> None:
    def run() -> float:
        recorder = train(hook, change, small(stage), accumulate_grad_batches=2)
        assert [(r.backwards, r.reductions) for r in recorder.reports] == [(2, 1)] * 3
        return distance(recorder.parameters, full_parameters(plain(change, 2, "after" in hook).module))

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.extended
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_and_their_norms_are_those_of_plain_torch(stage: int) -> None:
    seen: dict[str, list[Any]] = {"after": [], "before": [], "plain": []}

    class Watching(Module):
        def on_after_backward(self) -> None:
            seen["after"].append(grad_norm(self.net, norm_type=2))

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen["before"].append(grad_norm(self.net, norm_type=2))
            assert all(param.grad.dtype == param.dtype for param in self.parameters())

    def run() -> Any:
        recorder, _ = fit(Watching(), small(stage), BATCHES)
        watched = oracle()
        for batch in range(BATCHES):
            backward_of(watched, batch)
            for param, gradient in zip(watched.parameters, watched.gradients(), strict=True):
                param.grad = gradient
            seen["plain"].append(grad_norm(watched.module, norm_type=2))
            watched.step()
        result = full_parameters(watched.module)
        norms = [[{k: float(v) for k, v in norm.items()} for norm in seen[which]] for which in seen]
        return distance(recorder.parameters, result), norms

    for error, (after, before, expected) in run_ranks(run):
        assert error == 0.0 and len(expected) == BATCHES  # to look changes nothing
        expected = [pytest.approx(norms, rel=NORM) for norms in expected]
        assert after == expected and before == expected


@pytest.mark.extended(but=("2-clip, then clamp",))
@pytest.mark.parametrize("order", ["clip, then clamp", "clamp, then clip"])
@pytest.mark.parametrize("stage", STAGES)
def test_lightning_clips_in_the_order_of_the_calls(stage: int, order: str) -> None:
    class Clipping(Module):
        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            for what in order.split(", then "):
                if what == "clip":
                    self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
                else:
                    clamp(self.parameters())

    def change(params: Any) -> None:
        for what in order.split(", then "):
            {"clip": clip, "clamp": clamp}[what](params)

    def run() -> float:
        recorder, _ = fit(Clipping(), small(stage), BATCHES)
        return distance(recorder.parameters, full_parameters(plain(change).module))

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.extended
@pytest.mark.parametrize("stage", STAGES)
def test_the_trainers_clipping_comes_after_the_hook(stage: int) -> None:
    def run() -> float:
        recorder = train("on_before_optimizer_step", clamp, small(stage), gradient_clip_val=0.05)

        def change(params: Any) -> None:
            clamp(params)
            clip(params)

        return distance(recorder.parameters, full_parameters(plain(change).module))

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.extended(but=("2-after",))
@pytest.mark.parametrize("hook", ["after", "before", "before, clipped"])
@pytest.mark.parametrize("stage", STAGES)
def test_manual_optimization(stage: int, hook: str) -> None:
    """After a backward, this rank's own gradients; before the step, clipped as asked and averaged."""

    class Manual(Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(loss_of(self.net, batch) / 2)
            if batch_idx % 2:
                if "clipped" in hook:
                    self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()

    class After(Manual):
        def on_after_backward(self) -> None:
            halve(self.parameters())

    class Before(Manual):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            halve(self.parameters())

    def run() -> float:
        recorder, _ = fit(After() if hook == "after" else Before(), small(stage), BATCHES)
        assert [(r.backwards, r.reductions, r.early_reductions) for r in recorder.reports] == [
            (2, 1, int(hook != "after" and step > 0)) for step in range(3)
        ]
        expected = plain(halve, 2, hook == "after", clip=0.05 if "clipped" in hook else 0.0)
        return distance(recorder.parameters, full_parameters(expected.module))

    assert run_ranks(run) == [0.0, 0.0]


class Two(Module):
    """Two optimizers; the gradients of the second are left for a later step."""

    def __init__(self, changes: str) -> None:
        super().__init__()
        self.changes = changes
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [sgd(self.net[0].parameters()), sgd([*self.net[2].parameters(), *self.net[4].parameters()])]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.manual_backward(loss_of(self.net, batch) / 2)
        first.step()
        first.zero_grad()
        if batch_idx % 2:
            second.step()
            second.zero_grad()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        everything = self.changes == "all gradients"
        clip(self.parameters() if everything else [p for g in optimizer.param_groups for p in g["params"]])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


@pytest.mark.extended
@pytest.mark.parametrize("stage", STAGES)
def test_several_optimizers(stage: int) -> None:
    def run() -> float:
        recorder, _ = fit(Two("its own"), small(stage), BATCHES)
        net, data = network(), Data(BATCHES)
        first = Oracle(net, sgd(net[0].parameters()))
        second = Oracle(net, sgd([*net[2].parameters(), *net[4].parameters()]))
        for each in (first, second):
            each.optimizer.register_step_pre_hook(lambda *_, each=each: clip(each.parameters))
        for batch in range(BATCHES):
            backward_all([first, second], lambda rank, batch=batch: loss_of(net, data.batch(batch, rank)) / 2)
            first.step()
            if batch % 2:
                second.step()
        return distance(recorder.parameters, full_parameters(net))

    assert run_ranks(run) == [0.0, 0.0]


def test_gradients_of_another_optimizer_must_stay() -> None:
    def run() -> None:
        with pytest.raises(MisconfigurationException, match="that another optimizer trains"):
            fit(Two("all gradients"), small(2), BATCHES)

    run_ranks(run)


@pytest.mark.extended
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16(stage: int) -> None:
    """A hook that only looks changes no bit; one that halves, about as much as in fp32."""

    def run() -> Any:
        half = {"precision": "bf16-mixed"}
        bare = fit(Module(), small(stage), BATCHES, **half)[0].parameters
        looked = train("on_before_optimizer_step", nothing, small(stage), **half).parameters
        halved = train("on_before_optimizer_step", halve, small(stage), **half).parameters
        return distance(bare, looked), distance(halved, full_parameters(plain(halve).module))

    for looked, halved in run_ranks(run):
        assert looked == 0.0 and halved < 0.02  # to the bit: to look is to gather and to copy


@pytest.mark.extended
@pytest.mark.parametrize("change", [halve, clamp], ids=lambda change: change.__name__)
@pytest.mark.parametrize("stage", [2, 3])
def test_an_optimizer_offloaded_to_the_cpu(stage: int, change: Change) -> None:
    def run() -> float:
        offloaded = small(stage, offload_optimizer={"device": "cpu"})
        limit = 0.2 if change is clamp else None
        recorder = train("on_before_optimizer_step", change, offloaded, gradient_clip_val=limit)

        def expected_change(params: list[Any]) -> None:
            change(params)
            if limit:
                torch.nn.utils.clip_grad_norm_(params, limit)

        expected = plain(expected_change)
        return distance(recorder.parameters, full_parameters(expected.module))

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.extended
@pytest.mark.parametrize("stage", STAGES)
def test_what_hooks_gather_is_beside_the_step(stage: int) -> None:
    def run() -> Any:
        bare, _ = fit(Module(), small(stage), BATCHES, gradient_clip_val=0.05)
        hooked = train("on_before_optimizer_step", nothing, small(stage), gradient_clip_val=0.05)
        gradients = sum(parameter.numel() for parameter in bare.parameters.values()) * 4
        return [(ours, other, gradients) for ours, other in zip(hooked.reports, bare.reports, strict=True)]

    for reports in run_ranks(run):
        for step, (ours, other, gradients) in enumerate(reports):
            assert ours.bytes_sent - other.bytes_sent < 200  # norms
            assert abs(ours.apart["full gradients"] - gradients / 2) < 200  # one gather, on two ranks
            assert "full gradients" not in other.apart
            if step > 1:  # ZeRO-3 prefetches from then on
                assert ours.ratio < 1.02 and other.ratio < 1.02


def test_hooks_of_one_rank_alone_are_refused() -> None:
    def run() -> None:
        callbacks = [CallbackBeforeStep(nothing)] if os.environ["RANK"] == "0" else []
        with pytest.raises(ValueError, match=r"hooks on gradients: on_before_optimizer_step on rank 0; none on rank 1"):
            fit(Module(), small(2), BATCHES, callbacks=callbacks)

    run_ranks(run)


@pytest.mark.extended(but=("2-options0",))
@pytest.mark.parametrize("options", [{"coalesce": False}, {"grad_memory_budget": "1KB"}])
@pytest.mark.parametrize("stage", [2, 3])
def test_after_backward_with_gradients_taken_away(stage: int, options: dict[str, Any]) -> None:
    def run() -> float:
        with pytest.raises(MisconfigurationException, match=r"on_after_backward\(\) is overridden, and would find no"):
            train("on_after_backward", halve, ZeroSyncStrategy(stage=stage, **options), accumulate_grad_batches=2)
        recorder = train("on_after_backward", halve, ZeroSyncStrategy(stage=stage, **options))
        return distance(recorder.parameters, full_parameters(plain(halve).module))

    assert run_ranks(run) == [0.0, 0.0]
