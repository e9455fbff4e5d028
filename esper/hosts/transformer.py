"""The transformer host: GPT style, pre-norm, a head tied to the token embedding, and slots after groups of layers."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.core.blueprints.source import Shrinkable
from esper.core.place import Place
from esper.hosts.host import SegmentedHost, SiteSpan, Step
from esper.hosts.inputs import Inputs

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
        self.group_size = size
        """Blocks of each group at first; slots inside a block are in the last one of these."""
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
            after: list[nn.Module] = []
            if not rows:
                steps.append(Step(group))
            else:
                # The last block of those at first runs in its own steps, between which its sites lie.
                layers = list(group.children())
                blocks = [layer for layer in layers if isinstance(layer, Block)]
                block = blocks[self.group_size - 1]
                place_of_block = layers.index(block)
                before = layers[:place_of_block]
                after = layers[place_of_block + 1 :]
                if before:
                    steps.append(Step(nn.Sequential(*before)))
                first = len(steps)
                steps += block.steps(first)
                for row in rows:
                    source, sink, layers_of = INSIDE[row]
                    place = Place(
                        name=f"r{row}c{number}",
                        channels=block.width_at(row),
                        has_source=True,
                        layers=layers_of(block),
                        draw=draw_as_gpt2,
                    )
                    sites.append((SiteSpan(first + source, first + sink), place))
            if after:
                steps.append(Step(nn.Sequential(*after)))
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
        self._lay_out(
            steps,
            [place for _, place in sites],
            [span for span, _ in sites],
        )

    def deepen(
        self,
        slot: str,
        blocks: Sequence[nn.Module],
    ) -> None:
        """Puts more blocks behind those of the group before ``slot``, which is of row 0."""
        group = self.segments[int(slot.removeprefix("r0c"))]
        assert isinstance(group, nn.Sequential)
        group.extend(blocks)
        self.follow_layers()

    def draw(self, layer: nn.Module) -> None:
        draw_as_gpt2(layer)
        for block in self.blocks:
            if layer in block.last_layers:
                nn.init.normal_(layer.get_parameter("weight"), std=INIT_STD / math.sqrt(2 * len(self.blocks)))

    def take_blocks(self, names: Collection[str]) -> bool:
        """Makes the number of blocks in each group that of the parameters with these ``names``; returns whether it has
        changed. New blocks have weights of the group's last one."""
        lengths: dict[int, int] = {}
        for name in names:
            match = re.match(r"segments\.(\d+)\.(\d+)\.", name)
            if match:
                number = int(match[1])
                lengths[number] = max(lengths.get(number, 0), int(match[2]) + 1)
        changed = False
        for number, group in enumerate(self.segments[:-1]):
            assert isinstance(group, nn.Sequential)
            wanted = lengths.get(number, len(group))
            changed |= wanted != len(group)
            while len(group) > wanted:
                del group[-1]
            while len(group) < wanted:
                group.append(copy.deepcopy(group[-1]))
        return changed

    def follow_layers(self, x: Inputs | None = None) -> None:
        for block in self.blocks:
            block.attention.follow_weights()
        super().follow_layers(x)


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

    def __init__(
        self,
        vocabulary: int,
        width: int,
        block: int,
    ) -> None:
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

    def __init__(
        self,
        width: int,
        heads: int,
    ) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.attention(self.norm_attention(h))
        return h + self.mlp(self.norm_mlp(h))  # type: ignore[no-any-return]

    def empty(self) -> Block:
        """Makes a new block like this one that returns its input."""
        block = copy.deepcopy(self)
        draw_as_gpt2(block)
        for norm in (block.norm_attention, block.norm_mlp):
            norm.reset_parameters()
        for last in block.last_layers:
            nn.init.zeros_(last.weight)
        return block

    def width_at(self, row: int) -> int:
        """Returns the width of the features at the sink of the slot of this row, see ``INSIDE``."""
        if row == 3:
            return self.attention.query_key_value.out_features
        return self.norm_mlp.normalized_shape[0]

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


class CausalAttention(Shrinkable):
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
        split = projections.view(
            batch,
            length,
            3,
            self.heads,
            self.head_width,
        )
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [B, heads, T, head_width]
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
        )
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
    def absorb(
        self,
        more: nn.Module,
        alpha: float,
    ) -> None:
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
        self.follow_weights()

    @torch.no_grad()
    def fit(
        self,
        layer: nn.Module,
        last: nn.Module,
        units: int,
    ) -> None:
        """Gives ``last``, whose output is added to that of a ``layer`` in here, outputs of weight zero for the last
        ``units`` heads."""
        if layer is not self.query_key_value:
            return
        assert isinstance(last, nn.Linear)
        weight = last.get_parameter("weight")
        zeros = weight.new_zeros(units * self.head_width, *weight.shape[1:])
        parts: list[Tensor] = []
        for part in weight.chunk(3):  # queries, keys and values
            parts += [part, zeros]
        last.register_parameter("weight", nn.Parameter(torch.cat(parts), requires_grad=weight.requires_grad))
        last.out_features = self.query_key_value.out_features

    @torch.no_grad()
    def release(self, units: int) -> dict[str, Tensor]:
        """Takes the last ``units`` heads out; returns the state of attention with these heads alone."""
        layer = self.query_key_value
        kept = (self.heads - units) * self.head_width
        taken = {}
        for name in ("weight", "bias"):
            parts = layer.get_parameter(name).detach().chunk(3)  # queries, keys and values
            taken[f"query_key_value.{name}"] = torch.cat([part[kept:] for part in parts])
            layer.register_parameter(name, nn.Parameter(torch.cat([part[:kept] for part in parts])))
        columns = self.project.weight.detach()
        taken["project.weight"] = columns[:, kept:].clone()
        self.project.weight = nn.Parameter(columns[:, :kept].clone())
        self.follow_weights()
        return taken

    def follow_weights(self) -> None:
        """Notes the number of heads that the weights are of."""
        layer = self.query_key_value
        layer.out_features = len(layer.bias)
        self.project.in_features = self.project.weight.shape[1]
        self.heads = self.project.in_features // self.head_width


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
