"""The race checker on a GPU, where it follows CUDA's own streams and events; on the CPU simulated ones."""

from typing import Any

import pytest

from tests.gpu.device import followed, run
from tests.gpu.producers import backward, make
from tests.harness.ranks import ON_CPU
from zerosync_strategy.core.comm.streams import Streams


@pytest.mark.parametrize(
    ("stage", "rules"),
    [(2, ""), (2, "wait_for_reductions"), (3, ""), (3, "gathers_wait_for_writes gathers_wait_for_caller")],
    ids=["2", "2 without B3", "3", "3 without S1 and L2"],
)
def test_a_checked_run(stage: int, rules: str, record_property: Any) -> None:
    """Two producers of gradients: nothing is found, and with a rule off its race is."""

    def job() -> list[str]:
        with pytest.MonkeyPatch.context() as patch, followed() as recorder:
            for rule in rules.split():
                patch.setattr(Streams, rule, lambda self, *args: None)
            engine = make(2, stage=stage, ours={}, stage3_param_persistence_threshold=0)
            for k in range(4):
                backward(engine, k)
                if k % 2:
                    engine.step()
            return [str(finding) for finding in recorder.findings]

    for found in run(job, shared=True, env=ON_CPU):
        record_property("findings", found)
        assert bool(found) == bool(rules), found
