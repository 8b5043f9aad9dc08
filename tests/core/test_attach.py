"""Attaching to a plain DeepSpeed engine: the same window, everything given back, and errors with names."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

import zerosync_strategy
from tests.harness import engines
from tests.harness.copying import loss_of, make_engine, network, oracle
from tests.harness.engines import rank
from tests.harness.extended import STAGES
from tests.harness.oracle import distance, full_parameters
from tests.harness.ranks import run_ranks
from tests.harness.releases import except_from
from zerosync_strategy import StepReport, ZeroSync, ZeroSyncConfig, attach
from zerosync_strategy.core.attached.engine import check_backends
from zerosync_strategy.core.comm.journal import Traffic
from zerosync_strategy.core.engine import contract, deepspeed_internals, zero
from zerosync_strategy.core.failures.errors import CheckpointError
from zerosync_strategy.tools.plan.measures import ProcessCounter


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_steps_of_the_engine(stage: int) -> None:
    """DeepSpeed's own idiom: backward and step after every micro-batch; the engine steps on the last."""

    def run() -> Any:
        engine = make_engine(stage, gradient_accumulation_steps=4)
        zerosync = attach(engine)
        for k in range(8):
            engine.backward(loss_of(engine, k, rank()))
            engine.step()
        assert zerosync.report.step == engine.global_steps == 2
        return distance(full_parameters(engine.module), oracle(2, 4)), zerosync.report.reductions

    assert run_ranks(run) == [(0.0, 1)] * 2


def test_a_second_engine_over_the_same_parameters() -> None:
    """On ZeRO-3 both would gather and release; once the first is detached, the other one attaches."""

    def run() -> str:
        engines.start()
        module = network()
        first, second = (
            engines.make_engine(module, torch.optim.SGD(part.parameters(), lr=0.1), 3) for part in (module, module[-1])
        )
        zerosync = attach(first)
        with pytest.raises(ValueError, match="another attached engine gathers") as found:
            attach(second)
        zerosync.detach()
        attach(second).detach()
        return str(found.value)

    assert all("'0.weight'" in error for error in run_ranks(run))


@pytest.mark.extended(but=("3",))
@except_from("0.18.7", "0.19.0", "stock cannot step on stages 1 and 2 with this torch")
@pytest.mark.parametrize("stage", STAGES)
def test_detach_leaves_no_trace(stage: int) -> None:
    """Two steps attached and two detached are right, as are four that were never attached."""

    def run() -> float:
        def train(with_zerosync: bool) -> Any:
            # Of several persistent parameters, older releases gather some too late on gloo, when nothing is attached.
            whole = contract.has(deepspeed_internals.WHOLE_GATHER)
            engine = make_engine(stage, {} if whole or stage < 3 else {"stage3_param_persistence_threshold": 0})
            before = {**vars(engine), **{f"optimizer.{k}": v for k, v in vars(engine.optimizer).items()}}.keys()
            classes = type(engine), type(engine.optimizer), type(zero.comm_backend())
            zerosync = attach(engine) if with_zerosync else None
            for k in range(4):
                if k == 2 and zerosync is not None:
                    assert (type(engine), type(engine.optimizer), type(zero.comm_backend())) != classes
                    zerosync.detach()
                    zerosync.detach()  # once is enough, twice does no harm
                    assert (type(engine), type(engine.optimizer), type(zero.comm_backend())) == classes
                    after = {**vars(engine), **{f"optimizer.{k}": v for k, v in vars(engine.optimizer).items()}}
                    assert before == after.keys()
                    assert not [name for name in vars(zero.comm_backend()) if "zerosync" in name]
                engine.backward(loss_of(engine, k, rank()))
                engine.step()
            return full_parameters(engine.module)

        return max(distance(train(attached), oracle(4, 1)) for attached in (True, False))

    assert run_ranks(run) == [0.0, 0.0]


@except_from("0.18.7", "0.19.0", "stock cannot step on stages 1 and 2 with this torch")
@pytest.mark.parametrize("stage", STAGES)
def test_there_are_no_buffers_of_deepspeeds_own_reductions(stage: int) -> None:
    """They have the size of its buckets: by default 500 million elements, two of them with `overlap_comm`."""

    def run() -> list[int]:
        net = network()
        options = {"reduce_bucket_size": 12345, "overlap_comm": True}
        engine = engines.make_engine(net, torch.optim.SGD(net.parameters(), lr=0.1), stage, options)
        zerosync, found = attach(engine), [0, 0]

        def look(_: Any) -> None:
            for bucket in engine.optimizer.ipg_buckets.values():
                buffers = bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]
                found[k] = max(found[k], *(0 if each is None else each.numel() for each in [None, *buffers]))

        for param in net.parameters():
            param.register_post_accumulate_grad_hook(look)
        for k in range(2):
            if k:
                zerosync.detach()
            engine.backward(loss_of(engine, k, rank()))
            engine.step()
        return found

    assert run_ranks(run) == [[0, 12345]] * 2


@pytest.mark.parametrize("stage", STAGES)
def test_clip_next_step_is_for_one_step(stage: int) -> None:
    def run() -> float:
        engine = make_engine(stage)
        zerosync = attach(engine)
        for k in range(3):
            engine.backward(loss_of(engine, k, rank()))
            if k == 1:
                zerosync.clip_next_step(1.0)
                zerosync.clip_next_step(0.01)
            engine.step()
        with pytest.raises(ValueError, match="norm of 0 or more, got max_norm=-1"):
            zerosync.clip_next_step(-1)
        return distance(full_parameters(engine.module), oracle(3, 1, clip={1: 0.01}))

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_that_is_clipped_computes_the_norm(stage: int) -> None:
    """Also where DeepSpeed is told that no step needs it; the others do not."""
    if not hasattr(DeepSpeedZeroConfig(), "compute_grad_norm"):
        pytest.skip("this DeepSpeed always computes it")

    def run() -> Any:
        engine = make_engine(stage, {"compute_grad_norm": False})
        zerosync, norms = attach(engine), []
        for k in range(3):
            engine.backward(loss_of(engine, k, rank()))
            if k == 1:
                zerosync.clip_next_step(0.01)
            engine.step()
            norms.append(engine.get_global_grad_norm() is not None)
        return distance(full_parameters(engine.module), oracle(3, 1, clip={1: 0.01})), norms

    for error, norms in run_ranks(run):
        assert error == 0.0
        assert norms == [False, True, False]


@pytest.mark.extended
@pytest.mark.parametrize("stage", STAGES)
def test_optimizer_offloaded_to_the_cpu(stage: int) -> None:
    def run(coalesce: bool) -> float:
        engine = make_engine(stage, {"offload_optimizer": {"device": "cpu"}})
        attach(engine, coalesce=coalesce)
        for k in range(8):
            engine.backward(loss_of(engine, k, rank()) / 4)
            if k % 4 == 3:
                engine.step()
        return distance(full_parameters(engine.module), oracle(2, 4))

    assert run_ranks(run, True) == [0.0, 0.0]
    assert run_ranks(run, False) == [0.0, 0.0]


@pytest.mark.extended(but=("3-offloaded",))
@pytest.mark.parametrize("zero", [{}, {"offload_optimizer": {"device": "cpu"}}], ids=["", "offloaded"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_without_gradient_is_an_error_where_the_configuration_says_so(
    stage: int, zero: dict[str, Any]
) -> None:
    def run() -> float:
        engine = make_engine(stage, {**zero, "ignore_unused_parameters": False})
        zerosync = attach(engine)
        for k in range(3):
            engine.backward(loss_of(engine, k, rank()))
            engine.step()
        engine.backward(engine.module[0](torch.ones(2, 8)).sum())
        with pytest.raises(RuntimeError, match=r"'2\.weight', '2\.bias' since .*ignore_unused_parameters"):
            engine.step()
        error = distance(full_parameters(engine.module), oracle(3, 1))
        engine.backward(loss_of(engine, 3, rank()))  # now each has one, in one of both
        engine.step()
        assert zerosync.report.backwards == 2
        return error

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_that_deepspeed_does_not_manage(stage: int) -> None:
    def run() -> tuple[float, int, int]:
        engine = make_engine(stage, {"overlap_comm": False}, managed_gradient_accumulation=False)
        zerosync = attach(engine)
        for k in range(8):
            engine.backward(loss_of(engine, k, rank()) / 4)
            if k % 4 == 3:
                engine.step()
        assert zerosync.report is not None
        error = distance(full_parameters(engine.module), oracle(2, 4))
        return error, zerosync.report.backwards, zerosync.report.reductions

    assert run_ranks(run) == [(0.0, 4, 1)] * 2


def test_upstream_coalescing_and_no_sync_are_harmless_inside() -> None:
    def run() -> float:
        engine = make_engine(2)
        attach(engine)
        with engine.coalesce_grad_reduction():
            for k in range(4):
                with engine.no_sync():
                    engine.backward(loss_of(engine, k, rank()) / 4)
                    with pytest.raises(RuntimeError, match=r"step\(\) was called inside of engine\.no_sync\(\).*after"):
                        engine.step()
            with pytest.raises(RuntimeError, match=r"inside of engine\.coalesce_grad_reduction\(\).*after"):
                engine.step()
        engine.step()
        return distance(full_parameters(engine.module), oracle(1, 4))

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.parametrize("stage", STAGES)
def test_module_frozen_in_mid_window_keeps_its_gradient(stage: int) -> None:
    def run() -> float:
        engine = make_engine(stage)
        attach(engine)
        engine.backward(loss_of(engine, 0, rank()))
        engine.module[0].requires_grad_(False)
        engine.step()
        assert not engine.module[0].weight.requires_grad
        return distance(full_parameters(engine.module), oracle(1, 1))

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.parametrize("stage", [1, 3])
def test_loading_in_mid_window_drops_its_gradients(stage: int, tmp_path: Path) -> None:
    def run() -> float:
        engine = make_engine(stage)
        attach(engine)
        engine.save_checkpoint(tmp_path)
        engine.backward(loss_of(engine, 9, rank()))
        with pytest.warns(UserWarning, match=r"1 backward\(s\).*load_checkpoint"):
            engine.load_checkpoint(tmp_path)
        engine.backward(loss_of(engine, 0, rank()))
        engine.step()
        return distance(full_parameters(engine.module), oracle(1, 1))

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.parametrize("stage", [1, 3])
def test_reports_and_checkpoints_say_the_version(stage: int, tmp_path: Path) -> None:
    """A program that loads a checkpoint finds its own state, as it was saved."""

    def run() -> None:
        zerosync = attach(engine := make_engine(stage))
        engine.backward(loss_of(engine, 0, rank()))
        engine.step()
        engine.save_checkpoint(tmp_path, client_state={"own": 1})
        assert "zerosync_version" not in engine.load_checkpoint(tmp_path)[1]
        for path in tmp_path.glob("*/*model_states.pt"):
            assert torch.load(path, weights_only=False)["zerosync_version"] == zerosync_strategy.__version__
        assert zerosync.report.version == zerosync_strategy.__version__

    run_ranks(run)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_that_is_not_there(stage: int, tmp_path: Path) -> None:
    """DeepSpeed's own error is an AssertionError without a text; without a tag, it returns (None, None)."""

    def run() -> float:
        engine = make_engine(stage)
        attach(engine)
        engine.save_checkpoint(tmp_path, tag="here", save_latest=False)
        with pytest.raises(CheckpointError, match=rf"in {tmp_path}/nowhere: .*nowhere is no directory. Give"):
            engine.load_checkpoint(tmp_path / "nowhere", "here")
        with pytest.raises(CheckpointError, match=r"has no tag 'there'. Give a tag= that it has \('here'\)"):
            engine.load_checkpoint(tmp_path, tag="there")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert engine.load_checkpoint(tmp_path) == (None, None)
        found = [str(warning.message) for warning in caught if "loaded nothing" in str(warning.message)]
        assert [f"no file 'latest' in {tmp_path}." in text for text in found] == [True] * (rank() == 0)
        engine.backward(loss_of(engine, 0, rank()))
        engine.step()
        return distance(full_parameters(engine.module), oracle(1, 1))

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.off_device("it counts messages of gloo")
def test_report_counts_what_is_sent() -> None:
    """Stage 2, two ranks: each gradient to the rank that keeps it, the norm, and the updated parameters."""

    def run() -> Any:
        engine = make_engine(2)
        zerosync = attach(engine)
        zerosync.window.expect_last(False)
        with ProcessCounter() as counter:
            for _ in range(2):
                for k in range(3):
                    engine.backward(loss_of(engine, k, rank()))
                engine.step()
            return zerosync.report, counter.take(), sum(p.numel() * 4 for p in engine.module.parameters())

    report, both_steps, size = run_ranks(run)[0]
    assert (report.step, report.backwards, report.reductions) == (2, 3, 1)
    # The floor, and 48 bytes for the norm, in fp64: squares, and what ranks say of their backwards.
    assert report.collectives == {
        "isend": Traffic(4, size),  # two buckets: gradients to the rank that keeps them, parameters to the others
        "all_reduce": Traffic(1, 48),
    }
    assert report.floor_bytes == size and report.bytes_sent == size + 48 and report.ratio < 1.03
    assert report.peak_unreduced_bytes == size and report.peak_held_bytes == 0 and report.seconds > 0
    assert both_steps == {kind: traffic + traffic for kind, traffic in report.collectives.items()}
    assert isinstance(report, StepReport)


def test_refusals() -> None:
    def run() -> None:
        engine = make_engine(2, zerosync={"coalesce": False})
        with pytest.raises(TypeError, match="the engine that deepspeed"):
            attach(engine.module)
        with pytest.raises(ValueError, match="'coalesce' is False in the 'zerosync' block and True"):
            attach(engine, coalesce=True)
        with pytest.raises(ValueError, match="either config= or single options"):
            attach(engine, ZeroSyncConfig(), coalesce=True)
        with pytest.raises(ValueError, match="'coalesce' is False in the 'zerosync' block and True"):
            attach(engine, ZeroSyncConfig())
        zerosync = attach(engine)
        assert zerosync.config.coalesce is False
        with pytest.raises(ValueError, match="attached already"):
            attach(engine)
        engine.backward(loss_of(engine, 0, rank()))
        with pytest.raises(RuntimeError, match=r"1 backward\(s\).*step\(\).*abort\(\)"):
            zerosync.detach()
        with pytest.warns(UserWarning, match="my reason"):
            zerosync.abort("my reason")
        zerosync.detach()

        with pytest.raises(ValueError, match=r"'zero_optimization\.stage' = 0"):
            attach(make_engine(0))
        with pytest.raises(ValueError, match=r"BF16_Optimizer.*Use stage 2, or leave grad_accum_dtype out|FP16_Unf"):
            attach(make_engine(1, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"}))
        with pytest.raises(ValueError, match="needs an engine with an optimizer"):
            attach(engines.make_engine(network(), None))
        engine = make_engine(2)
        config = engine._config._param_dict
        refused = {"zero_quantized_gradients": "quantized gradients", "zenflow": "ZenFlow", "mics_shard_size": "MiCS"}
        for name, found in refused.items():
            config["zero_optimization"][name] = 2
            with pytest.raises(ValueError, match=found):
                attach(engine)
            del config["zero_optimization"][name]

    run_ranks(run)


STILL_THERE = {
    "report", "abort", "detach", "end", "has_backward", "keeps_gradients",
    "clips_next_step",
}  # fmt: skip
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "mean_over": (1,),
    "clip_next_step": (1.0,),
    "load_full_state": ({},),
    "export": ("x",),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_handle_is_of_no_use_twice_or_after_its_end(stage: int) -> None:
    """Every public method of a handle: what it reports stays, what would act on the engine is an error."""

    def use(zerosync: Any, name: str) -> Any:
        member = getattr(zerosync, name)
        result = (
            member(*(("somewhere",) if name == "export" else ARGUMENTS.get(name, ()))) if callable(member) else None
        )
        if hasattr(result, "__enter__"):
            with result:
                return None
        return result

    def run() -> set[str]:
        names = {name for name in dir(ZeroSync) if not name.startswith("_")}
        detached, destroyed = make_engine(stage), make_engine(stage)
        handles = [attach(detached), attach(destroyed)]
        with pytest.raises(ValueError, match=r"attached already. Use its handle, or detach\(\) first"):
            attach(detached)
        for wrong in ({"coalesce": False}, "all", 1):
            with pytest.raises(
                TypeError, match=r"config=ZeroSyncConfig\(...\), got .*attach\(engine, coalesce=False\)"
            ):
                attach(make_engine(stage), wrong)
        for wrong in ("1", None, -1, float("nan")):
            with pytest.raises(ValueError, match=r"clip_next_step.* takes a norm of 0 or more, got max_norm="):
                handles[0].clip_next_step(wrong)
        handles[0].detach()
        destroyed.destroy()
        again = attach(detached)
        for zerosync in handles:
            for name in names & STILL_THERE:
                use(zerosync, name)
            for name in names - STILL_THERE:
                with pytest.raises(RuntimeError, match=rf"{name}\(\) was called on the handle of an engine that is no"):
                    use(zerosync, name)
        again.clip_next_step(1.0)
        assert again.clips_next_step and not handles[0].clips_next_step
        return names

    for names in run_ranks(run):
        assert names > STILL_THERE, STILL_THERE - names


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.off_device("it is about gloo")
def test_gloo_for_tensors_on_a_gpu_is_refused(stage: int) -> None:
    """It would be given addresses of the device as the host's. One rank sends nothing."""

    def run() -> float:
        engine = make_engine(stage)
        engine.device = torch.device("cuda", 0)
        if dist.get_world_size() > 1:
            with pytest.raises(ValueError, match=r"ranks \[0, 1\] with .*cuda:gloo.* on cuda:0.*with 'nccl'"):
                attach(engine)
        else:
            check_backends([dist.group.WORLD], engine.device)
        engine.device = torch.device("cpu")
        attach(engine)
        engine.backward(loss_of(engine, 0, rank()))
        engine.step()
        return distance(full_parameters(engine.module), oracle(1, 1))

    assert run_ranks(run) == [0.0, 0.0]
    run_ranks(run, world_size=1)


def test_the_engine_has_its_handle() -> None:
    """As errors tell programs that have not called attach() themselves, under `zerosync run`."""

    def run() -> None:
        engine = make_engine(2)
        zerosync = attach(engine)
        assert engine.zerosync is zerosync
        zerosync.detach()
        assert not hasattr(engine, "zerosync")

    run_ranks(run, world_size=1)
