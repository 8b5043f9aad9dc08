"""ZeRO-3: sharded weights that a program reads and differentiates, or writes with gradients, as in plain torch."""

from contextlib import nullcontext
from typing import Any

import deepspeed
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from tests.harness.engines import make_engine, rank
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach

WIDTH, CLASSES, STEPS = 6, 4, 3
ZERO = {"stage3_param_persistence_threshold": 0}
OFF_DEVICE = pytest.mark.off_device("the race checker knows no transforms of torch.func")
OPTIONS = pytest.mark.parametrize("options", [{}, {"param_memory_budget": "all"}], ids=["gathered anew", "held"])


class Fused(torch.autograd.Function):
    """A loss that computes its gradients in its forward, in one of several ways."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, weight: torch.Tensor, how: str) -> torch.Tensor:
        target = torch.arange(len(h)) % CLASSES
        if "transforms" in how:
            grads, loss = torch.func.grad_and_value(
                lambda h, weight: F.cross_entropy(h @ weight.t(), target), argnums=(0, 1)
            )(h, weight)
        elif "by hand" in how:
            error = torch.softmax(h @ weight.t(), -1)
            loss = -error.gather(1, target[:, None]).log().mean()
            error[torch.arange(len(h)), target] -= 1
            grads = error @ weight / len(h), error.t() @ h / len(h)
        else:
            with torch.enable_grad():
                inputs = h.detach().requires_grad_(), weight.detach().requires_grad_()
                loss = F.cross_entropy(inputs[0] @ inputs[1].t(), target)
            grads, loss = torch.autograd.grad(loss, inputs), loss.detach()
        ctx.save_for_backward(*grads)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        of_h, of_weight = ctx.saved_tensors
        return grad * of_h, grad * of_weight, None


class Plus(nn.Module):
    def __init__(self, delta: torch.Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.delta


class Adapter(nn.Module):
    """With a frozen layer and a low-rank change of its weight, which `merge()` adds to it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(1, WIDTH)), nn.Parameter(torch.randn(WIDTH, 1))

    def forward(self, x: torch.Tensor, parametrized: bool) -> torch.Tensor:
        if not parametrized:
            return self.base(x) + x @ (self.b @ self.a).t()
        parametrize.register_parametrization(self.base, "weight", Plus(self.b @ self.a))
        try:
            return self.base(x)
        finally:
            parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)

    def merge(self) -> None:
        self.base.weight.data += self.b @ self.a
        self.base.weight.data[0] += (self.b @ self.a)[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.adapters = nn.ModuleList(Adapter() for _ in range(2))
        self.decoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.judge = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(), nn.Linear(WIDTH, 1))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: torch.Tensor, how: str) -> torch.Tensor:
        for adapter in self.adapters:
            x = adapter(x, how == "parametrizations")
        y = self.decoder(x)
        if how != "an adaptive weight":
            return y
        last, loss = self.decoder[-1].weight, (y - 1).square().mean()
        (of_loss,) = torch.autograd.grad(loss, last, retain_graph=True)
        (of_judge,) = torch.autograd.grad(self.judge(y).mean(), [last], retain_graph=True)
        return loss - of_loss.norm().detach() / of_judge.norm().detach() * self.judge(y).mean()


def transformed(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Gradients of each sample and along a direction, by parameters as they are; and transforms that read them."""

    def call(params: dict[str, Any], of: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, params, (of, "")).square().mean()

    params = {name: param for name, param in net.named_parameters() if param.requires_grad}
    last = {"decoder.2.weight": params["decoder.2.weight"]}
    of_samples = torch.vmap(torch.func.grad(call), (None, 0))(params, x[:, None])
    ones = {name: torch.ones(param.shape) for name, param in last.items()}
    _, along = torch.func.jvp(lambda of: call({**params, **of}, x), (last,), (ones,))
    curvature = torch.func.hessian(lambda of: call({**params, "decoder.2.bias": of}, x))(params["decoder.2.bias"])
    inside = torch.func.grad(lambda of: (of @ net.decoder[0].weight.t()).square().mean())(x)
    each = torch.vmap(lambda of: (of @ params["head.weight"].t()).sum())(x)
    parts = [*of_samples.values(), curvature, inside, each]
    return along + sum(part.square().mean() for part in parts)


def loss_of(model: Any, net: Net, x: torch.Tensor, how: str) -> torch.Tensor:
    if how == "transforms":
        return model(x, how).square().mean() + transformed(net, x)
    found = model(x, how)
    if how == "an adaptive weight":
        return found
    if "fused" not in how:
        return F.cross_entropy(found @ net.head.weight.t(), torch.arange(len(x)) % CLASSES)
    sharded = "gathered" in how and hasattr(net.head.weight, "ds_id")
    with deepspeed.zero.GatheredParameters([net.head.weight]) if sharded else nullcontext():
        return Fused.apply(found, net.head.weight, how)


def values(step: int, of_rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + of_rank))


@pytest.mark.extended(
    but=(
        "fused-gathered anew",
        "parametrizations-held",
        "fused by transforms-gathered anew",
    )
)
@OPTIONS
@pytest.mark.parametrize(
    "how",
    ["fused", "fused by hand", "fused, gathered", "an adaptive weight", "parametrizations", "merges",
     *(pytest.param(how, marks=OFF_DEVICE)
       for how in ("fused by transforms, gathered", "fused by transforms", "transforms"))],
)  # fmt: skip
def test_it_trains_as_in_plain_torch(how: str, options: dict[str, Any]) -> None:
    def run() -> float:
        net, plain = Net(), Net()
        sgd = [torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.2) for each in (net, plain)]
        oracle = Oracle(plain, sgd[1])
        engine = make_engine(net, sgd[0], 3, ZERO)
        attach(engine, **options).window.expect_last(False)
        for step in range(STEPS):
            for k in range(2):
                engine.backward(loss_of(engine, net, values(2 * step + k, rank()), how))
                oracle.backward(lambda of, step=step, k=k: loss_of(plain, plain, values(2 * step + k, of), how))
            engine.step()
            oracle.step()
            if how == "merges":
                for adapter in (*net.adapters, *plain.adapters):
                    adapter.merge()
        error = distance(full_parameters(net), full_parameters(plain))
        engine.destroy()
        return error

    assert run_ranks(run) == [0.0, 0.0]
