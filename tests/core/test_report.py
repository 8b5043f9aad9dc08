"""What a report says of a step when it is printed."""

from dataclasses import replace

from zerosync_strategy import StepReport
from zerosync_strategy.core.comm.journal import Traffic

REPORT = StepReport(
    step=12, backwards=8, reductions=1, early_reductions=1, floor_bytes=139_823_104, peak_unreduced_bytes=139_823_104,
    peak_held_bytes=0, peak_host_bytes=0, loaded_bytes=0, peak_unsharded_bytes=0, seconds=0.01234,
    collectives={"isend": Traffic(18, 69_911_552), "all_gather_into_tensor": Traffic(2, 70_000_000)},
)  # fmt: skip


def test_a_step_is_four_lines() -> None:
    assert str(REPORT).splitlines() == [
        "step 12: 8 backwards, 1 reduction (1 during a backward); 12.3 ms of host time in reductions, waiting included",
        "collectives: 18 isend of 69.91 MB, 2 all_gather_into_tensor of 70 MB",
        "bytes: 139.9 MB sent by this rank, 1.001 x the minimum of 139.8 MB for these options",
        "memory peaks: 139.8 MB of unreduced gradients",
    ]


def test_memory_of_parameters_stands_where_there_is_some() -> None:
    held = replace(
        REPORT, peak_unsharded_bytes=2_500, peak_held_bytes=999, peak_host_bytes=3, loaded_bytes=2_000_000_000
    )
    assert str(held).splitlines()[3] == (
        "memory peaks: 139.8 MB of unreduced gradients, 2.5 kB of gathered parameters, 999 B of parameters held until"
        " the step, 3 B of parameters in host memory; 2 GB loaded from host memory"
    )


def test_a_logger_gets_every_number() -> None:
    numbers = replace(REPORT, peak_host_bytes=3, loaded_bytes=2, peak_node_bytes=1).numbers()
    assert numbers["peak_host_bytes"] == 3 and numbers["loaded_bytes"] == 2 and numbers["peak_node_bytes"] == 1
    assert numbers["bytes_sent"] == 139_911_552 and numbers["isend/calls"] == 18 and "step" not in numbers


def test_one_rank_sends_nothing() -> None:
    alone = replace(REPORT, backwards=1, early_reductions=0, floor_bytes=0, peak_unreduced_bytes=0, collectives={})
    assert str(alone).splitlines() == [
        "step 12: 1 backward, 1 reduction; 12.3 ms of host time in reductions, waiting included",
        "collectives: none",
        "bytes: 0 B sent by this rank, 1.000 x the minimum of 0 B for these options",
        "memory peaks: none",
    ]
