"""The oracle: plain torch in one process on the global batch, and how to compare with it.

Beside each training it makes the same one rounded otherwise. So every parameter has a bound on what another processor
or another order of a sum may make of it, and `distance` counts what is beyond that.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.harness.rounding import Drift, RoundedOtherwise, bounded, excess, least

_drift = Drift()

# How far a norm may be off, relatively: 84 units in the last place. It is a sum of squares, of which none cancels
# another: any order of them leaves it right to a few units, and a gradient that is wrong in the last places to a few.
NORM = 1e-5


class Oracle:
    """Data-parallel training of `module` by its definition: local gradients per rank, their mean, one step.

    A parameter without a gradient is stepped with zeros, because ZeRO steps flat partitions; one that is frozen is not.
    Each backward and each step is made twice, first rounded otherwise, so hooks in them run twice. A loss is made once.
    """

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, world_size: int = 2) -> None:
        self.module = module
        self.optimizer = optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.ranks: list[list[torch.Tensor | None]] = [[None] * len(self.parameters) for _ in range(world_size)]
        self._noise = [torch.zeros_like(p, requires_grad=False) for p in self.parameters]

    def backward(self, loss_of: Callable[[int], torch.Tensor]) -> None:
        """One backward on every rank; `loss_of(rank)` is that rank's loss."""
        for rank in range(len(self.ranks)):
            self.backward_on(rank, loss_of(rank))

    def backward_on(self, rank: int, loss: torch.Tensor) -> None:
        _backward([self], rank, loss)

    def zero_grad(self) -> None:
        self.ranks = [[None] * len(self.parameters) for _ in self.ranks]
        self._noise = [torch.zeros_like(noise) for noise in self._noise]

    def step(self, clip: float = 0.0) -> float:
        """One optimizer step, clipped to this norm unless it is 0; the norm before that, or 0."""
        norm = self._change(lambda noises: self._step(clip, noises))
        self.zero_grad()
        return norm

    def switch(self, mode: str) -> None:
        """Call `train()` or `eval()` of an optimizer that exchanges the parameters for others."""
        self._change(lambda _: getattr(self.optimizer, mode)())

    def train(
        self, loss_of: Callable[[Any, int, int], torch.Tensor], steps: int, backwards: int = 1,
        clip: dict[int, float] | None = None,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """The parameters after so many steps, each of so many backwards: of `loss_of(module, k, rank)` for k = 0, 1 ...

        `clip` has norms by step.
        """
        for k in range(steps * backwards):
            self.backward(lambda rank, k=k: loss_of(self.module, k, rank))
            if (k + 1) % backwards == 0:
                self.step((clip or {}).get(k // backwards, 0.0))
        return full_parameters(self.module)

    def gradients(self) -> list[torch.Tensor]:
        """Of each parameter that has one on every rank, their mean, which knows how far rounding may move it."""
        means = []
        for noise, *grads in zip(self._noise, *self.ranks, strict=True):
            means.append(torch.stack(grads).mean(0))
            means[-1].rounding = least(noise / len(grads), means[-1])
        return means

    def state_of(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """A copy of a state of the optimizer, which knows how far rounding may have moved it."""
        state = self.optimizer.state[param][name].clone()
        state.rounding = _drift.of(param, name, state)
        return state

    def _change(self, change: Callable[[Any], Any]) -> Any:
        """Call `change` twice, first with noises for the gradients and rounded otherwise; what it returns then."""
        options = [dict(group) for group in self.optimizer.param_groups]
        with self._as_rounded_otherwise() as moved, RoundedOtherwise():
            change(self._noise)
            moved.extend((param.data, self.optimizer.state.get(param, {})) for param in self.parameters)
        for group, before in zip(self.optimizer.param_groups, options, strict=True):
            group.update(before)  # some count steps there
        result = change([None] * len(self.parameters))
        for param, (values, state) in zip(self.parameters, moved, strict=True):
            _drift.note(param, {"": param.data, **self.optimizer.state.get(param, {})}, {"": values, **state})
        return result

    def _step(self, clip: float, noises: list[torch.Tensor] | list[None]) -> float:
        for param, noise, *grads in zip(self.parameters, noises, *self.ranks, strict=True):
            if not param.requires_grad and all(grad is None for grad in grads):
                param.grad = None
                continue
            total = torch.zeros_like(param)
            if any(grad is not None for grad in grads):
                grads.append(noise)
            for grad in grads:
                if grad is not None:
                    total += grad
            param.grad = total / len(self.ranks)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, clip)) if clip else 0.0
        self.optimizer.step()
        return norm

    @contextmanager
    def _as_rounded_otherwise(self) -> Iterator[list]:
        """Parameters and optimizer are those of the training that is rounded otherwise. Yields an empty list."""
        state = self.optimizer.state
        self.optimizer.state = defaultdict(dict, {param: _drift.moved(param, of) for param, of in state.items()})
        try:
            with _drift.applied(self.parameters):
                yield []
        finally:
            self.optimizer.state = state


def backward_all(oracles: list[Oracle], loss_of: Callable[[int], torch.Tensor]) -> None:
    """One backward on every rank, with gradients for the parameters of all `oracles`, which have one module."""
    for rank in range(len(oracles[0].ranks)):
        _backward(oracles, rank, loss_of(rank))


def _backward(oracles: list[Oracle], rank: int, loss: torch.Tensor) -> None:
    """Backward twice: rounded otherwise, for the difference alone, and as it is."""
    grads = {p: p.grad for oracle in oracles for p in (*oracle.module.parameters(), *oracle.parameters)}
    for param in grads:
        param.grad = None
    with RoundedOtherwise():
        loss.backward(retain_graph=True)
    otherwise = {param: param.grad for param in grads}
    for param, grad in grads.items():
        param.grad = grad
    before = []
    for oracle in oracles:
        for param, grad in zip(oracle.parameters, oracle.ranks[rank], strict=True):
            before.append(0 if grad is None else grad.clone())
            param.grad = grad
    loss.backward()
    for oracle in oracles:
        oracle.ranks[rank] = [param.grad for param in oracle.parameters]
        for param, noise in zip(oracle.parameters, oracle._noise, strict=True):
            so_far = before.pop(0)
            if otherwise[param] is not None:
                noise += otherwise[param] - (param.grad - so_far)


def full_parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every parameter in full and in fp32; under ZeRO-3 they are gathered. A collective call there."""
    import deepspeed

    full = {}
    for name, param in module.named_parameters():
        with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
            full[name] = value_of(param)
    return full


def value_of(param: torch.Tensor, dtype: torch.dtype | None = torch.float32) -> torch.Tensor:
    """A copy, which knows how far rounding may have moved it, if an oracle has trained the parameter."""
    value = param.detach().clone().to(dtype or param.dtype)
    value.rounding = _drift.of(param)
    return value


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Its `state_dict()`, of such copies in their own dtypes."""
    return {name: value_of(tensor, None) for name, tensor in module.state_dict(keep_vars=True).items()}


def full_average(average: torch.nn.Module, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of an average of `module`, which an oracle trains: rounding moves a mean as far as its terms."""
    found = full_parameters(average)
    for value, of_module in zip(found.values(), full_parameters(module).values(), strict=True):
        value.rounding = of_module.rounding
    return found


def of_trained(module: torch.nn.Module, compute: Callable[[], Any]) -> Any:
    """What `compute()` makes of a module that an oracle trains: tensors that know how far rounding may move them."""
    return bounded(compute, _drift.applied(module.parameters()))


def distance(ours: dict[str, torch.Tensor], oracle: dict[str, torch.Tensor]) -> float:
    """The largest difference of any element that rounding does not explain; the two must name the same parameters.

    So 0.0 is what is right. Where no oracle has trained the parameters, it means that they are equal to the bit.
    """
    assert ours.keys() == oracle.keys(), ours.keys() ^ oracle.keys()
    return max(excess(ours[name], oracle[name]) for name in ours)
