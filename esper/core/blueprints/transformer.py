"""Blueprints for channels-last hosts: modules from [B, T, D] ("mlp": [B, D]) to a delta of the same shape.

In a "transformer", position t of the delta depends only on positions 1 to t of the features; in an "encoder", such as
BERT or a ViT, on all of them. The modules have no skip connection: the
host's own path is the skip. The last factor of every delta is a per-channel scale that starts at 0.1, see ChannelScale.
The usual LoRA starts with one factor at zero, which leaves the other factor without a gradient.

Deltas of modules that begin with LayerNorm start with an RMS of 0.1 (`norm`) or less at any scale of the features. The
LoRAs are linear in the features; their deltas start at about 0.03 of the features' scale.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from esper.core.blend import AT_BIRTH, ChannelScale
from esper.core.blueprints.registry import BLUEPRINTS, Factory

HEAD_WIDTH = 32


def positionwise(name: str, parameters: Callable[[int], int]) -> Callable[[Factory], Factory]:
    """Registers a factory whose module treats each position separately, for all channels-last hosts."""

    def decorate(build: Factory) -> Factory:
        for topology in ("transformer", "encoder", "mlp"):
            BLUEPRINTS.register(topology, name, parameters)(build)
        return build

    return decorate


class AttentionSeed(nn.Module):
    """Self-attention [B, T, D] to [B, T, D]; 4D² parameters.

    If it is ``causal``, position t attends to positions 1 to t, otherwise to all of them, also to padding.

    It has no biases: a bias on the keys would have no gradient, as it shifts all scores of a position equally.
    """

    def __init__(self, dims: int, causal: bool) -> None:
        super().__init__()
        self.heads = attention_heads(dims)
        self.causal = causal
        self.project = nn.Linear(dims, 3 * dims, bias=False)
        self.merge = nn.Linear(dims, dims, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.project(h).chunk(3, dim=2)
        q = self._split(q)
        k = self._split(k)
        v = self._split(v)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.merge(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _split(self, part: Tensor) -> Tensor:
        """[B, T, D] to [B, heads, T, D / heads]."""
        batch, length, width = part.shape
        return part.reshape(batch, length, self.heads, width // self.heads).transpose(1, 2)


def attention_heads(dims: int) -> int:
    """Returns the most heads that divide ``dims`` and are at least 32 wide, else one."""
    for heads in range(dims // HEAD_WIDTH, 1, -1):
        if dims % heads == 0:
            return heads
    return 1


def low_rank(dims: int, rank: int) -> nn.Module:
    """scale · B A h with A of [rank, D] and B of [D, rank]."""
    return nn.Sequential(
        nn.Linear(dims, rank, bias=False),
        nn.Linear(rank, dims, bias=False),
        ChannelScale(dims),
    )


def feed_forward(dims: int, factor: int) -> nn.Module:
    """scale · W2 gelu(W1 norm(h)) with ``factor`` · D hidden units."""
    hidden = factor * dims
    return nn.Sequential(
        nn.LayerNorm(dims),
        nn.Linear(dims, hidden),
        nn.GELU(),
        nn.Linear(hidden, dims),
        ChannelScale(dims),
    )


@positionwise("norm", parameters=lambda d: 2 * d)
def norm(dims: int) -> nn.Module:
    """Rescaled LayerNorm: evens out the features' scale; 2D parameters."""
    layer = nn.LayerNorm(dims)
    nn.init.constant_(layer.weight, AT_BIRTH)
    return layer


@positionwise("lora", parameters=lambda d: 17 * d)
def lora(dims: int) -> nn.Module:
    """Linear map of rank 8; 17D parameters."""
    return low_rank(dims, 8)


@positionwise("lora_large", parameters=lambda d: 65 * d)
def lora_large(dims: int) -> nn.Module:
    """Linear map of rank 32; 65D parameters."""
    return low_rank(dims, 32)


@BLUEPRINTS.register("transformer", "attention", parameters=lambda d: 4 * d * d + 3 * d)
def attention(dims: int) -> nn.Module:
    """Causal self-attention with heads of 32 dims or more; 4D² + 3D parameters."""
    return nn.Sequential(nn.LayerNorm(dims), AttentionSeed(dims, causal=True), ChannelScale(dims))


@BLUEPRINTS.register("encoder", "attention", parameters=lambda d: 4 * d * d + 3 * d)
def full_attention(dims: int) -> nn.Module:
    """Self-attention to all positions, with heads of 32 dims or more; 4D² + 3D parameters."""
    return nn.Sequential(nn.LayerNorm(dims), AttentionSeed(dims, causal=False), ChannelScale(dims))


@positionwise("mlp_small", parameters=lambda d: 4 * d * d + 6 * d)
def mlp_small(dims: int) -> nn.Module:
    """Feed-forward with 2D hidden units; 4D² + 6D parameters."""
    return feed_forward(dims, 2)


@positionwise("mlp", parameters=lambda d: 8 * d * d + 8 * d)
def mlp(dims: int) -> nn.Module:
    """Feed-forward with 4D hidden units; 8D² + 8D parameters."""
    return feed_forward(dims, 4)
