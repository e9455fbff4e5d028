"""The transformer host: GPT style, pre-norm, a head tied to the token embedding, and slots after groups of layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.core.place import Place
from esper.hosts.host import SegmentedHost, SiteSpan, Step

INIT_STD = 0.02


class TransformerHost(SegmentedHost):
    """Maps tokens int64 [B, T] to the logits of each next token, float32 [B, T, vocabulary].

    The layers are divided into ``slots`` equal groups, with a slot after each group (row 0), which the host has at
    first. :meth:`use_slots` chooses others as well: in the last block of a group, more units in its feed-forward part
    (row 1), more heads (row 2), and a change of the weights that make queries, keys and values (row 3). Weights start
    as in GPT-2: normal with σ = 0.02 and biases 0, but σ / √(2·layers) for the last layer of each of the 2·layers
    residual branches, so that their sum starts no larger in a deep host than in a shallow one.

    Args:
        vocabulary: number of tokens, 0 ... vocabulary − 1.
        width: features of a token, a multiple of ``heads``.
        layers: number of blocks, a multiple of ``slots``.
        heads: number of attention heads.
        block: max length of a sequence.
        slots: number of groups, whose slots are named r0c0, r0c1, ...

    Raises ValueError for numbers below 1, or that are not the multiples above.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        layers: int,
        heads: int,
        block: int,
        slots: int,
    ) -> None:
        if min(vocabulary, width, layers, heads, block, slots) < 1:
            raise ValueError("vocabulary, width, layers, heads, block and slots must each be 1 or more")
        if width % heads or layers % slots:
            raise ValueError(
                f"width ({width}) must be a multiple of heads ({heads}), and layers ({layers}) of slots ({slots})"
            )
        embedding = TokenEmbedding(vocabulary, width, block)
        blocks = [Block(width, heads) for _ in range(layers)]
        size = layers // slots
        segments: list[nn.Module] = []
        for first in range(0, layers, size):
            group: list[nn.Module] = list(blocks[first : first + size])
            if not segments:
                group.insert(0, embedding)
            segments.append(nn.Sequential(*group))
        segments.append(nn.Sequential(nn.LayerNorm(width), TiedHead(embedding)))
        sites = [Place(f"r0c{number}", width) for number in range(slots)]
        super().__init__(segments, sites, topology="transformer")
        self.width = width
        self.heads = heads
        self._use_slots(set(self.slot_names))  # with the blocks before each place
        self.of_width = partial(
            TransformerHost,
            vocabulary,
            layers=layers,
            heads=heads,
            block=block,
            slots=slots,
        )
        """Makes a host like this one with another ``width``."""
        draw_as_gpt2(self)
        std = INIT_STD / math.sqrt(2 * layers)
        for layer in blocks:
            for last in layer.last_layers:
                nn.init.normal_(last.weight, std=std)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks, in order."""
        layers: list[nn.Module] = []
        for group in self.segments:
            layers += group.children()
        return tuple(layer for layer in layers if isinstance(layer, Block))

    @property
    def possible_slots(self) -> tuple[str, ...]:
        rows = range(len(INSIDE) + 1)
        groups = range(len(self.segments) - 1)
        return tuple(f"r{row}c{group}" for row in rows for group in groups)

    def _use_slots(self, names: set[str]) -> None:
        steps: list[Step] = []
        sites: list[tuple[SiteSpan, Place]] = []
        *groups, head = self.segments
        for number, group in enumerate(groups):
            rows = [row for row in INSIDE if f"r{row}c{number}" in names]
            if not rows:
                steps.append(Step(group))
            else:
                # The last block runs in its own steps, between which its sites lie.
                *before, block = group.children()
                assert isinstance(block, Block)
                if before:
                    steps.append(Step(nn.Sequential(*before)))
                first = len(steps)
                steps += block.steps(first)
                for row in rows:
                    source, sink, layers = INSIDE[row]
                    place = Place(
                        name=f"r{row}c{number}",
                        channels=CHANNELS[row] * self.width,
                        has_source=True,
                        layers=layers(block),
                        draw=draw_as_gpt2,
                    )
                    sites.append((SiteSpan(first + source, first + sink), place))
            if f"r0c{number}" in names:
                is_last = number == len(groups) - 1
                place = Place(
                    name=f"r0c{number}",
                    channels=self.width,
                    group=tuple(block for block in group.children() if isinstance(block, Block)),
                    stack=self.blocks if is_last else (),
                )
                sites.append((SiteSpan(len(steps), len(steps)), place))
        steps.append(Step(head))
        sites.sort(key=lambda site: site[0].sink)
        self._lay_out(steps, [place for _, place in sites], [span for span, _ in sites])


def draw_as_gpt2(module: nn.Module) -> None:
    """Draws the weights of a layer as GPT-2's are: normal with σ = 0.02, and biases 0."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            nn.init.normal_(layer.weight, std=INIT_STD)
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            nn.init.zeros_(layer.bias)


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

    def empty(self) -> Block:
        """Makes a new block like this one that returns its input."""
        (width,) = self.norm_mlp.normalized_shape
        block = Block(width, self.attention.heads)
        draw_as_gpt2(block)
        for last in block.last_layers:
            nn.init.zeros_(last.weight)
        return block

    @property
    def last_layers(self) -> tuple[nn.Linear, nn.Linear]:
        """The last layer of each of its two residual branches."""
        last = self.mlp[-1]
        assert isinstance(last, nn.Linear)
        return self.attention.project, last

    def steps(self, first: int) -> list[Step]:
        """Returns the steps of which the block consists, of which the first one begins at joint ``first``."""
        mixed = AttentionFromProjections(self.attention)
        return [
            Step(self.norm_attention),
            Step(self.attention.query_key_value),
            Step(mixed, adds=first),
            Step(self.norm_mlp),
            Step(self.mlp, adds=first + 3),
        ]


class CausalAttention(nn.Module):
    """Causal self-attention: [B, T, width] to the same shape; each token attends to itself and earlier ones.

    Heads have ``width / heads`` features, or ``head_width``.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_width: int | None = None,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.head_width = head_width or width // heads
        inner = heads * self.head_width
        self.query_key_value = nn.Linear(width, 3 * inner)
        self.project = nn.Linear(inner, width)

    def forward(self, h: Tensor) -> Tensor:
        return self.from_projections(self.query_key_value(h))

    def from_projections(self, projections: Tensor) -> Tensor:
        """Returns the output for the queries, keys and values of all tokens, [B, T, 3 · inner]."""
        batch, length, _ = projections.shape
        split = projections.view(batch, length, 3, self.heads, self.head_width)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [B, heads, T, head_width]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    @property
    def units(self) -> int:
        """Number of heads, which :meth:`more` adds to."""
        return self.heads

    def more(self, units: int) -> CausalAttention:
        """Makes attention with ``units`` heads like these, whose output is added to the output here."""
        width = self.query_key_value.in_features
        return CausalAttention(width, units, self.head_width)

    @torch.no_grad()
    def absorb(self, more: nn.Module, alpha: float) -> None:
        """Takes over the heads of ``more``, whose output counts ``alpha`` times."""
        assert isinstance(more, CausalAttention)
        layer = self.query_key_value
        for name in ("weight", "bias"):
            old = layer.get_parameter(name).chunk(3)
            new = more.query_key_value.get_parameter(name).chunk(3)
            parts: list[Tensor] = []
            for pair in zip(old, new, strict=True):
                parts += pair  # queries, keys and then values of all heads
            layer.register_parameter(name, nn.Parameter(torch.cat(parts)))
        columns = [self.project.weight, alpha * more.project.weight]
        self.project.weight = nn.Parameter(torch.cat(columns, dim=1))
        layer.out_features = len(layer.bias)
        self.project.in_features = self.project.weight.shape[1]
        self.heads += more.heads


class AttentionFromProjections(nn.Module):
    """The part of an attention layer behind the projection to queries, keys and values."""

    def __init__(self, attention: CausalAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, projections: Tensor) -> Tensor:
        return self.attention.from_projections(projections)


INSIDE: Mapping[int, tuple[int, int, Callable[[Block], tuple[nn.Module, ...]]]] = MappingProxyType(
    {
        1: (4, 5, lambda block: tuple(block.mlp)),
        2: (1, 3, lambda block: (block.attention,)),
        3: (1, 2, lambda block: (block.attention.query_key_value,)),
    }
)
"""Source and sink of the slots inside a block, by row: joints counted from its start, see :meth:`Block.steps`, and the
layers between them."""

CHANNELS = {1: 1, 2: 1, 3: 3}
"""Features at their sinks, in units of the host's width."""


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
