"""A mixture of experts in plain torch, with the experts on several groups of ranks. It knows nothing of DeepSpeed."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, Block
from torch import nn


class Exchange(torch.autograd.Function):
    """Part i of what each rank has goes to rank i of the group; the gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return Exchange.apply(gradient, ctx.group), None


class MixtureOfExperts(nn.Module):
    """Sends each token to the expert that its router likes best, as far as the expert has room (Fedus et al., 2021).

    Args:
        width: of a token.
        experts: in all.
        exchange: the group whose ranks have different experts and exchange tokens; ``None``: all experts are here.
        held_by: a context in which this rank's experts are built.
        room: tokens that an expert takes from one rank, as a multiple of an even share. The others pass it by.
    """

    def __init__(
        self, width: int, experts: int, exchange: Any = None,
        held_by: AbstractContextManager[Any] | None = None, room: float = 1.25,
    ) -> None:  # fmt: skip
        super().__init__()
        self.exchange, self.room = exchange, room
        self.parts = dist.get_world_size(exchange) if exchange is not None else 1
        here = experts // self.parts
        first = here * (dist.get_rank(exchange) if exchange is not None else 0)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList()
        with held_by or nullcontext():
            for number in range(first, first + here):
                with torch.random.fork_rng():  # each expert its own, whoever builds it
                    torch.manual_seed(number)
                    self.experts.append(
                        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                    )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens in and out, and how unevenly they are spread: 1 if evenly."""
        tokens = x.flatten(0, -2)
        experts = self.router.out_features
        room = max(1, int(self.room * len(tokens) / experts))
        weights = self.router(tokens).softmax(-1)
        weight, expert = weights.max(-1)
        chosen = F.one_hot(expert, experts)
        uneven = experts * (chosen.float().mean(0) * weights.mean(0)).sum()

        seat = (chosen.cumsum(0) * chosen).sum(-1) - 1  # a token's place among those of its expert
        seated = seat < room
        place = (expert * room + seat)[seated]
        sent = tokens.new_zeros(experts * room, tokens.shape[-1]).index_copy(0, place, tokens[seated])
        received = sent if self.exchange is None else Exchange.apply(sent, self.exchange)
        # By rank of origin, then by expert.
        work = received.unflatten(0, (self.parts, len(self.experts), room)).unbind(1)
        done = torch.stack([expert(part) for expert, part in zip(self.experts, work, strict=True)], 1)
        back = done.flatten(0, 2) if self.exchange is None else Exchange.apply(done.flatten(0, 2), self.exchange)
        out = torch.zeros_like(tokens).index_copy(0, seated.nonzero().squeeze(-1), back[place] * weight[seated, None])
        return out.view_as(x), uneven


class MoEBlock(Block):
    """A block whose perceptron is a mixture of experts."""

    def __init__(self, width: int, heads: int, experts: MixtureOfExperts) -> None:
        super().__init__(width, heads)
        del self.up, self.down
        self.experts = experts
        self.uneven = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attend(x)
        out, self.uneven = self.experts(self.norm_2(x))
        return x + out


class MoEGPT(GPT):
    """A GPT with experts in every second block. ``mixture`` makes one mixture of experts."""

    def __init__(self, layers: int, width: int, context: int, mixture: Any, heads: int = 4) -> None:
        super().__init__(layers, width, context, heads)
        for index in range(1, layers, 2):
            self.blocks[index] = MoEBlock(width, heads, mixture())

    def uneven(self) -> torch.Tensor:
        """How unevenly the last forward spread tokens over experts, as a mean over the blocks."""
        return torch.stack([block.uneven for block in self.blocks if isinstance(block, MoEBlock)]).mean()
