"""A small GPT over bytes in plain torch. It knows nothing of DeepSpeed or Lightning."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each behind a norm and added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attention.transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attend(x)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out. Each parameter is used only in its own module's ``forward``."""

    def __init__(self, layers: int, width: int, context: int, heads: int = 4) -> None:
        super().__init__()
        self.context = context
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(positions))))


def next_byte_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per byte of guessing each byte from those before it."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
