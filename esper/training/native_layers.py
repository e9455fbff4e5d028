"""Esper's own layers on a tape: seeds, and the layers of hosts and blueprints that torch does not have."""

from __future__ import annotations

import torch
from torch import nn

from esper.core.blend import ChannelScale, Seed
from esper.core.blueprints.adapted import AdaptedLinear
from esper.core.blueprints.cnn import SqueezeExcite
from esper.core.blueprints.source import Applied, Deeper
from esper.core.blueprints.transformer import AttentionSeed
from esper.core.place import SPATIAL
from esper.core.ramps import BlendOperator
from esper.core.site import contiguous_input
from esper.hosts.cnn import Pooled
from esper.hosts.transformer import (
    AttentionFromProjections,
    Block,
    CausalAttention,
    TiedHead,
    TokenEmbedding,
)
from esper.ops.norm_relu_pool import NormReluPool
from esper.ops.tape import (
    HARMLESS_HOOKS,
    RELU_COLUMN,
    WRITERS,
    Tape,
    Unsupported,
    require_plain,
    writes,
)
from esper.training.rng import OwnedDropout

# It changes the layout of a tensor, and tapes have their own.
HARMLESS_HOOKS.add(contiguous_input)

FUNCTIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
}
"""Activations by the name of their function in ``torch.nn.functional``."""


@writes(ChannelScale)
def _scale(tape: Tape, module: ChannelScale, value: int) -> int:
    return tape.emit("scale", value, tape.shapes[value], [tape.parameter(module.weight)])


@writes(SqueezeExcite)
def _squeeze_excite(tape: Tape, module: SqueezeExcite, value: int) -> int:
    weights = tape.add(module.excite, tape.global_mean(value))
    return tape.times(value, weights)


@writes(Deeper)
def _deeper(tape: Tape, module: Deeper, value: int) -> int:
    return tape.plus(tape.add(module.blocks, value), value, -1.0)


@writes(AdaptedLinear)
def _adapted(tape: Tape, module: AdaptedLinear, value: int) -> int:
    return tape.plus(WRITERS[nn.Linear](tape, module, value), tape.add(module.adapter, value), 1.0)


@writes(Applied)
def _applied(tape: Tape, module: Applied, value: int) -> int:
    kind = FUNCTIONS.get(module.function)
    if kind is None:
        raise Unsupported(f"the function {module.function} has no compiled form")
    return tape.activate(kind(**module.options), value)


@writes(NormReluPool)
def _norm_relu_pool(tape: Tape, module: NormReluPool, value: int) -> int:
    return _norm_and_pool(tape, module, value, module.pool)


@writes(Pooled)
def _pooled(tape: Tape, module: Pooled, value: int) -> int:
    return _norm_and_pool(tape, module.norm, value, pool=True)


def _norm_and_pool(
    tape: Tape,
    norm: NormReluPool,
    value: int,
    pool: bool,
) -> int:
    value = WRITERS[nn.BatchNorm2d](tape, norm, value)
    tape.code[-1][RELU_COLUMN[nn.BatchNorm2d]] = 1
    if pool:
        value = tape.add(nn.MaxPool2d(2), value)
    return value


@writes(TokenEmbedding)
def _embedding(tape: Tape, module: TokenEmbedding, value: int) -> int:
    require_plain(module.token)
    require_plain(module.position)
    if tape.length > module.position.num_embeddings:
        raise Unsupported(f"a sequence of {tape.length} tokens is too long for its host")
    tokens = tape.parameter(module.token.weight)
    positions = tape.parameter(module.position.weight)
    numbers = [tokens, positions, tape.length]
    return tape.emit("embedding", value, (module.token.embedding_dim, 1, 1), numbers)


@writes(TiedHead)
def _tied_head(tape: Tape, module: TiedHead, value: int) -> int:
    (embedding,) = module._tied
    weight = embedding.token.weight
    return tape.linear(value, len(weight), tape.shared(weight))


@writes(Block)
def _block(tape: Tape, module: Block, value: int) -> int:
    mixed = tape.add_all([module.norm_attention, module.attention], value)
    value = tape.plus(value, mixed)
    changed = tape.add_all([module.norm_mlp, module.mlp], value)
    return tape.plus(value, changed)


@writes(CausalAttention)
def _causal_attention(tape: Tape, module: CausalAttention, value: int) -> int:
    projections = tape.add(module.query_key_value, value)
    return _from_projections(tape, module, projections)


@writes(AttentionFromProjections)
def _attention_from_projections(tape: Tape, module: AttentionFromProjections, value: int) -> int:
    require_plain(module.attention)
    return _from_projections(tape, module.attention, value)


def _from_projections(tape: Tape, attention: CausalAttention, value: int) -> int:
    mixed = tape.attention(value, attention.heads, attention.head_width, causal=True)
    return tape.add(attention.project, mixed)


@writes(AttentionSeed)
def _attention_seed(tape: Tape, module: AttentionSeed, value: int) -> int:
    width = module.merge.in_features // module.heads
    projections = tape.add(module.project, value)
    mixed = tape.attention(projections, module.heads, width, module.causal)
    return tape.add(module.merge, mixed)


@writes(OwnedDropout)
def _dropout(tape: Tape, module: OwnedDropout, value: int) -> int:
    if module.p > 0 and module.training and not tape.evaluates:
        raise Unsupported("dropout has no compiled form")
    return value


@writes(Seed)
def _seed(tape: Tape, seed: Seed, value: int) -> int:
    """Writes the delta of a seed, as ``Seed.forward`` computes it."""
    if seed.order:
        raise Unsupported("a seed for dimensions in another order has no compiled form")
    if seed.leading is None:
        return _delta(tape, seed, value)
    channels = tape.shapes[value][0]
    dtype = next(seed.parameters()).dtype
    leading = tape.add(_first_channels(channels, seed.leading, dtype), value)
    return tape.add(_first_channels(seed.leading, channels, dtype), _delta(tape, seed, leading))


def _first_channels(inputs: int, outputs: int, dtype: torch.dtype) -> nn.Conv2d:
    """Makes a convolution that returns its first channels as they are, and zeros where it has too few."""
    with torch.device("meta"):
        layer = nn.Conv2d(inputs, outputs, 1, bias=False)
    identity = torch.eye(outputs, inputs, dtype=dtype)
    layer.weight = nn.Parameter(identity.view(outputs, inputs, 1, 1), requires_grad=False)
    return layer


def _delta(tape: Tape, seed: Seed, value: int) -> int:
    body = tape.add(seed.body, value)
    if seed.operator is BlendOperator.MULTIPLY:
        return tape.times(value, tape.activate(nn.Tanh(), body))
    if seed.gate is None:
        return body
    means = value
    if seed.topology in SPATIAL:
        means = tape.global_mean(value)
    elif seed.topology == "encoder":
        raise Unsupported("a gate that sees all positions of a sequence has no compiled form")
    elif tape.length > 1:
        means = tape.emit("running_mean", value, tape.shapes[value], [tape.length])
    return tape.times(body, tape.add(seed.gate, means))
