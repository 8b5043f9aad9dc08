"""DeepSpeed's own expert parallelism (AutoEP) under ZeRO-3: its groups are found, and the result is plain torch's."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.engines import make_engine, rank
from tests.harness.oracle import NORM, Oracle, of_trained
from tests.harness.ranks import run_ranks
from tests.harness.releases import since
from tests.harness.rounding import excess
from zerosync_strategy import attach

transformers = pytest.importorskip("transformers")
WORLD, BACKWARDS, STEPS, CLIP = 4, 2, 3, 0.1


def mixtral() -> Any:
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2,
        )
    )  # fmt: skip


def loss_of(model: Any, k: int, rank: int) -> torch.Tensor:
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(10 * k + rank))
    return model(input_ids=tokens, labels=tokens).loss / BACKWARDS


@pytest.mark.extended
@since("0.19.3", "AutoEP's experts have no groups under ZeRO-3")
def test_losses_and_norms_are_those_of_one_process() -> None:
    def run() -> Any:
        from transformers.utils import output_capturing

        # DeepSpeed 0.19.8 asks with a default, which transformers 5.23 does not take.
        registry = output_capturing._CanRecordRegistry
        stock = registry.get
        registry.get = lambda self, model, default=None: stock(self, model)
        model = mixtral()
        experts = {"enabled": True, "autoep_size": 2, "preset_model": "mixtral", "use_grouped_mm": False}
        engine = make_engine(
            model, torch.optim.SGD(model.parameters(), lr=0.5), zero={"stage3_param_persistence_threshold": 0},
            gradient_clipping=CLIP, expert_parallel=experts,
        )  # fmt: skip
        attach(engine)
        groups = Counter(
            tuple(dist.get_process_group_ranks(param.ds_process_group)) for param in engine.module.parameters()
        )
        plain = mixtral()
        oracle = Oracle(plain, torch.optim.SGD(plain.parameters(), lr=0.5), WORLD)
        errors, norms = [], []
        for k in range(STEPS * BACKWARDS):
            loss = loss_of(engine, k, rank())
            theirs = of_trained(plain, lambda k=k: loss_of(plain, k, rank()).detach())
            engine.backward(loss)
            oracle.backward(lambda r, k=k: loss_of(plain, k, r))
            errors.append(excess(loss, theirs))
            if (k + 1) % BACKWARDS == 0:
                engine.step()
                norms.append((float(engine.get_global_grad_norm()), oracle.step(CLIP)))
        return groups, errors, norms

    for index, (groups, errors, norms) in enumerate(run_ranks(run, world_size=WORLD)):
        assert set(groups) == {(0, 1, 2, 3), (index % 2, index % 2 + 2)}  # those that have the same experts
        assert max(errors) == 0.0
        for ours, theirs in norms:
            assert ours == pytest.approx(theirs, rel=NORM) and theirs > CLIP
