"""Inside of a forward a parameter is itself: the leaf that autograd and torch.func see. Against plain torch."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.harness.engines import make_engine, rank
from tests.harness.oracle import full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach

STEPS = 3
Backward = Callable[[Any, Any, torch.Tensor], None]  # of the engine or what it wraps, of that, and of a batch


class FusedLoss(torch.autograd.Function):
    """Computes the gradients in its forward, from a weight that it detaches."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            h, weight = h.detach().requires_grad_(), weight.detach().requires_grad_()
            loss = F.cross_entropy(h @ weight.t(), torch.arange(len(h)) % len(weight))
        ctx.save_for_backward(*torch.autograd.grad(loss, (h, weight)))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        of_h, of_weight = ctx.saved_tensors
        return grad * of_h, grad * of_weight


def save_matmuls(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(6, 8)
        self.block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 3, bias=False)
        self.block_is_checkpointed = self.loss_is_fused = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x).tanh()
        if self.block_is_checkpointed:
            contexts = functools.partial(create_selective_checkpoint_contexts, save_matmuls)
            h = checkpoint(self.block, h, use_reentrant=False, context_fn=contexts)
        else:
            h = self.block(h)
        if self.loss_is_fused:
            return FusedLoss.apply(h, self.head.weight)
        return self.head(h).square().mean(-1)


def backward_of_inputs(call: Any, net: Any, x: torch.Tensor) -> None:
    call(x).mean().backward()
    call(x).sqrt().mean().backward(inputs=list(net.block.parameters()))


def grad_of_parameters(call: Any, net: Any, x: torch.Tensor) -> None:
    norms = [grad.norm() for grad in torch.autograd.grad(call(x).mean(), list(net.parameters()))]
    (call(x).mean() * sum(norms)).backward()


def grad_of_some_unused(call: Any, net: Any, x: torch.Tensor) -> None:
    unused = torch.zeros(3, requires_grad=True)
    *grads, none = torch.autograd.grad(call(x).mean(), [*net.parameters(), unused], allow_unused=True)
    assert none is None
    (call(x).mean() * sum(grad.norm() for grad in grads)).backward()


def weight_detached_in_a_function(call: Any, net: Any, x: torch.Tensor) -> None:
    net.loss_is_fused = True
    call(x).backward()


def gradient_penalty(call: Any, net: Any, x: torch.Tensor) -> None:
    x.requires_grad_()
    y = call(x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.mean() + (grad.norm(dim=1) - 1).square().mean()).backward()


def selective_checkpoint(call: Any, net: Any, x: torch.Tensor) -> None:
    net.block_is_checkpointed = True
    call(x).mean().backward()


def perturbed_parameters(call: Any, net: Any, x: torch.Tensor) -> None:
    perturbed = {name: param * 0.9 + 0.01 for name, param in net.named_parameters()}
    (functional_call(net, perturbed, (x,)).mean() + call(x).sqrt().mean()).backward()


def torch_func_grad(call: Any, net: Any, x: torch.Tensor) -> None:
    of_input = torch.func.grad(lambda x: net(x).sum())(x)
    call(x + of_input.detach()).mean().backward()


def torch_func_vmap(call: Any, net: Any, x: torch.Tensor) -> None:
    parameters = {name: param.detach() for name, param in net.named_parameters()}
    of_samples = torch.func.vmap(lambda x: functional_call(net, parameters, (x[None],)).sum())(x)
    (call(x) * of_samples).mean().backward()


PROGRAMS: list[Backward] = [
    backward_of_inputs, grad_of_parameters, grad_of_some_unused, weight_detached_in_a_function, gradient_penalty,
    selective_checkpoint, perturbed_parameters, torch_func_grad, torch_func_vmap,
]  # fmt: skip
HELD = {"param_memory_budget": "all"}


def batch(step: int, of_rank: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + of_rank))


def plain_training(net: nn.Module, backward: Backward) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    for step in range(STEPS):
        optimizer.zero_grad()
        for of_rank in range(2):
            backward(net, net, batch(step, of_rank))
        for param in net.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad / 2
        optimizer.step()
    return full_parameters(net)


def errors_of(programs: list[Backward], stage: int, **options: Any) -> dict[str, float]:
    """By program, the largest relative difference to plain torch of any parameter, on two ranks."""

    def run() -> dict[str, float]:
        errors = {}
        for backward in programs:
            net = Net()
            expected = plain_training(copy.deepcopy(net), backward)
            zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
            engine = make_engine(net, torch.optim.SGD(net.parameters(), lr=0.2), stage, zero)
            attach(engine, **options)
            for step in range(STEPS):
                backward(engine, net, batch(step, rank()))
                engine.step()
            found = full_parameters(net)
            engine.destroy()
            differences = [float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected]
            errors[backward.__name__] = max(differences)
        return errors

    first, second = run_ranks(run, timeout=60)
    assert first == second
    return first


TRANSFORMS = [torch_func_grad, torch_func_vmap]  # whose tensors have no storage that the simulated device could follow


@pytest.mark.extended
@pytest.mark.off_device("transforms of torch.func")
def test_on_stage_2() -> None:
    assert max(errors_of(PROGRAMS, 2).values()) < 1e-5


@pytest.mark.extended
def test_where_all_is_held() -> None:
    assert max(errors_of([each for each in PROGRAMS if each not in TRANSFORMS], 3, **HELD).values()) < 1e-5


@pytest.mark.extended
@pytest.mark.off_device("transforms of torch.func")
def test_where_a_transform_gathers_what_is_held() -> None:
    assert max(errors_of(TRANSFORMS, 3, **HELD).values()) < 1e-5


@pytest.mark.off_device("transforms of torch.func")
@pytest.mark.parametrize("backward", TRANSFORMS)
def test_transforms_where_nothing_is_held(backward: Backward) -> None:
    assert max(errors_of([backward], 3).values()) < 1e-5


@pytest.mark.extended(
    but=(
        "grad_of_parameters",
        "weight_detached_in_a_function",
        "gradient_penalty",
    )
)
@pytest.mark.parametrize("backward", [each for each in PROGRAMS if each not in TRANSFORMS])
def test_where_nothing_is_held(backward: Backward) -> None:
    assert max(errors_of([backward], 3).values()) < 1e-5
