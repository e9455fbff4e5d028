"""The transformer host: GPT style, pre-norm, a head tied to the token embedding, and slots after groups of layers."""

from __future__ import annotations

import math
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from esper.hosts.host import SegmentedHost
from esper.seeds.site import SlotSite

INIT_STD = 0.02


class TransformerHost(SegmentedHost):
    """Maps tokens int64 [B, T] to the logits of each next token, float32 [B, T, vocabulary].

    The layers are divided into ``slots`` equal groups, with a slot after each group. Weights start as in GPT-2: normal
    with σ = 0.02 and biases 0, but σ / √(2·layers) for the last layer of each of the 2·layers residual branches, so
    that their sum starts no larger in a deep host than in a shallow one.

    Args:
        vocabulary: number of tokens, 0 ... vocabulary − 1.
        width: features of a token, a multiple of ``heads``.
        layers: number of blocks, a multiple of ``slots``.
        heads: number of attention heads.
        block: max length of a sequence.
        slots: number of slots, named r0c0, r0c1, ...

    Raises ValueError for numbers below 1, or that are not the multiples above.
    """

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, block: int, slots: int) -> None:
        if min(vocabulary, width, layers, heads, block, slots) < 1:
            raise ValueError("vocabulary, width, layers, heads, block and slots must each be 1 or more")
        if width % heads or layers % slots:
            raise ValueError(
                f"width ({width}) must be a multiple of heads ({heads}), and layers ({layers}) of slots ({slots})"
            )
        embedding = TokenEmbedding(vocabulary, width, block)
        blocks = [Block(width, heads) for _ in range(layers)]
        size = layers // slots
        groups: list[list[nn.Module]] = [list(blocks[first : first + size]) for first in range(0, layers, size)]
        groups[0].insert(0, embedding)
        segments: list[nn.Module] = [nn.Sequential(*group) for group in groups]
        segments.append(nn.Sequential(nn.LayerNorm(width), TiedHead(embedding)))
        super().__init__(segments, [SlotSite(f"r0c{i}", width) for i in range(slots)], topology="transformer")
        self.width, self.heads = width, heads
        self.of_width = partial(TransformerHost, vocabulary, layers=layers, heads=heads, block=block, slots=slots)
        """Makes a host like this one with another ``width``."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        for layer in blocks:
            for last in (layer.attention.project, layer.mlp[-1]):
                assert isinstance(last, nn.Linear)
                nn.init.normal_(last.weight, std=INIT_STD / math.sqrt(2 * layers))


class TokenEmbedding(nn.Module):
    """Token embedding plus learned position: int64 [B, T] to float32 [B, T, width].

    Raises ValueError for a sequence that is longer than ``block``.
    """

    def __init__(self, vocabulary: int, width: int, block: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(block, width)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        # A traced length is not a number: a sequence that is too long then fails to broadcast.
        if isinstance(length, int) and length > self.position.num_embeddings:
            raise ValueError(f"a sequence of {length} tokens; this host sees at most {self.position.num_embeddings}")
        return self.token(tokens) + self.position.weight[:length]  # type: ignore[no-any-return]


class Block(nn.Module):
    """h + attention(norm(h)), then h + mlp(norm(h)); h [B, T, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.attention(self.norm_attention(h))
        return h + self.mlp(self.norm_mlp(h))  # type: ignore[no-any-return]


class CausalAttention(nn.Module):
    """Causal self-attention: [B, T, width] to the same shape; each token attends to itself and earlier ones."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        batch, length, width = h.shape
        split = self.query_key_value(h).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [B, heads, T, width / heads]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class TiedHead(nn.Module):
    """Logits from the token embedding's weights: [B, T, width] to [B, T, vocabulary].

    The embedding is kept in a tuple so that it is not a submodule here: its tensor is in the state dict once
    (safetensors refuses tensors that share memory) and is counted once, and deep copies of the host stay tied.
    """

    def __init__(self, embedding: TokenEmbedding) -> None:
        super().__init__()
        self._tied = (embedding,)

    def forward(self, h: Tensor) -> Tensor:
        return F.linear(h, self._tied[0].token.weight)
