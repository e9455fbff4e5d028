"""Blueprints for features with the channels last: exact sizes, and no position that depends on a later one."""

from collections.abc import Callable

import pytest
import torch

from esper.core.blend import Seed
from esper.core.blueprints import BLUEPRINTS
from esper.core.blueprints.transformer import AttentionSeed, attention_heads
from esper.core.ramps import BlendOperator

NAMES = ("norm", "lora", "lora_large", "attention", "mlp_small", "mlp")


POSITIONWISE = ("norm", "lora", "lora_large", "mlp_small", "mlp")


WIDTHS = (1, 3, 4, 16, 17, 32, 64, 96)


# Counted by hand: LayerNorm 2D, scale D, a Linear layer in · out, and out more with bias.
FORMULAS: dict[str, Callable[[int], int]] = {
    "norm": lambda d: 2 * d,
    "lora": lambda d: d * 8 + 8 * d + d,
    "lora_large": lambda d: d * 32 + 32 * d + d,
    "attention": lambda d: 2 * d + d * 3 * d + d * d + d,
    "mlp_small": lambda d: 2 * d + (d * 2 * d + 2 * d) + (2 * d * d + d) + d,
    "mlp": lambda d: 2 * d + (d * 4 * d + 4 * d) + (4 * d * d + d) + d,
}


def make(
    name: str, operator: BlendOperator, width: int, topology: str = "transformer"
) -> Seed:
    return Seed(BLUEPRINTS.get(topology, name).build(width), operator, width, topology)


def test_the_blueprints_are_registered_in_this_order() -> None:
    assert BLUEPRINTS.names("transformer") == BLUEPRINTS.names("encoder") == NAMES
    assert BLUEPRINTS.names("mlp") == POSITIONWISE


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_blueprint_has_exactly_the_parameters_it_states(
    name: str, width: int
) -> None:
    for topology in (
        ("transformer", "encoder", "mlp")
        if name in POSITIONWISE
        else ("transformer", "encoder")
    ):
        blueprint = BLUEPRINTS.get(topology, name)
        count = sum(p.numel() for p in blueprint.build(width).parameters())
        assert count == blueprint.parameters(width) == FORMULAS[name](width)
        assert blueprint.description


@pytest.mark.parametrize(
    ("dims", "heads"),
    [(1, 1), (16, 1), (32, 1), (63, 1), (64, 2), (96, 3), (97, 1), (100, 2), (384, 12)],
)
def test_attention_takes_the_most_heads_that_leave_thirty_two_dims(
    dims: int, heads: int
) -> None:
    assert attention_heads(dims) == heads
    assert AttentionSeed(dims, causal=True)(torch.randn(2, 3, dims)).shape == (
        2,
        3,
        dims,
    )


def test_attention_is_the_softmax_of_scores_over_the_positions_so_far() -> None:
    torch.manual_seed(0)
    layer, h = AttentionSeed(64, causal=True), torch.randn(2, 5, 64)
    q, k, v = layer.project(h).split(64, dim=2)
    mixed = torch.zeros(2, 5, 64)
    for head in (slice(0, 32), slice(32, 64)):
        for t in range(5):
            scores = (
                torch.einsum("bd,bsd->bs", q[:, t, head], k[:, : t + 1, head]) / 32**0.5
            )
            mixed[:, t, head] = torch.einsum(
                "bs,bsd->bd", scores.softmax(dim=1), v[:, : t + 1, head]
            )
    torch.testing.assert_close(layer(h), layer.merge(mixed))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("operator", BlendOperator)
def test_no_position_depends_on_a_later_one(name: str, operator: BlendOperator) -> None:
    torch.manual_seed(0)
    seed = make(name, operator, 64)
    h = torch.randn(4, 9, 64)
    with torch.no_grad():
        # Large weights, so that a small scale hides no leak.
        for parameter in seed.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
        before = seed(h)
        for t in (0, 1, 4, 8):
            changed = h.clone()
            changed[:, t] += 3 * torch.randn(4, 64)
            after = seed(changed)
            torch.testing.assert_close(after[:, :t], before[:, :t], rtol=0, atol=1e-6)
            assert float((after[:, t] - before[:, t]).abs().max()) > 1e-3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("topology", ["transformer", "encoder"])
def test_a_batch_without_samples_passes_through(name: str, topology: str) -> None:
    for operator in BlendOperator:
        seed = make(name, operator, 8, topology)
        assert seed(torch.zeros(0, 5, 8)).shape == (0, 5, 8)


@pytest.mark.parametrize("operator", BlendOperator)
def test_in_an_encoder_the_first_position_depends_on_the_last(
    operator: BlendOperator,
) -> None:
    """It depends through the attention, or through a seed's gate; neither depends on the order of positions."""
    torch.manual_seed(0)
    name = "mlp_small" if operator is BlendOperator.GATE else "attention"
    seed, h = make(name, operator, 8, "encoder"), torch.randn(2, 5, 8)
    other = h.clone()
    other[:, -1] += 1
    assert not torch.equal(seed(h)[:, 0], seed(other)[:, 0])
    torch.testing.assert_close(seed(h.flip(1)), seed(h).flip(1))
