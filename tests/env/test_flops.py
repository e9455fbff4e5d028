"""Operations of hosts and seeds: counted beforehand, paid for, limited and observed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from esper.config import ConfigError, TrainingConfig
from esper.core.action import ActionSpec, Op
from esper.core.blueprints import BLUEPRINTS, BlueprintRegistry
from esper.core.blueprints.source import SHARES
from esper.core.place import Features, Place
from esper.core.slots import Slots
from esper.core.stage import SeedStage as S
from esper.core.state import Choices, EpisodeRules, never_shrinks
from esper.env.catalog import BlueprintCatalog
from esper.env.planted import PlantedVectorEnv
from esper.env.planted_law import SimParams
from tests.core.grown import made
from tests.core_helpers import flat_baseline, rig

PLACES = [
    Place("r0c0", 6),
    Place("r1c0", 6, True, (nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 6))),
]
HOST_FLOPS = 2 * (3 * 9 * 64 + 6 * 3 * 9 * 16 + 6 * 10)
"""The host of `digits`, by hand: 3 kernels of 9 weights on 8×8 pixels, 6 of 27 on 4×4, and a head of 6 by 10."""


def rules(slots: int = 2, host_flops: float = 1000.0, **tables: Any) -> EpisodeRules:
    """Two blueprints, one that is small and computes much, and one that is large and computes little."""
    flops = np.array([[900.0, 100.0]] * slots)
    choices = Choices(
        100,
        host_flops,
        np.array([[10, 80]] * slots),
        flops,
        np.full(slots, 6),
        np.zeros((2, 6)),
        **never_shrinks(slots),
    )
    return EpisodeRules(TrainingConfig.parse(tables), flat_baseline(30), 30, choices)


def holding(*blueprints: int) -> Slots:
    """One host with a blended seed of each of these blueprints, and an empty slot for -1."""
    slots = made(1, len(blueprints))
    slots.stage[0] = [S.DORMANT if number < 0 else S.HOLDING for number in blueprints]
    slots.blueprint[0] = blueprints
    slots.parameters[0] = [
        0 if number < 0 else (10, 80)[number] for number in blueprints
    ]
    return slots


def test_the_operations_of_seeds_are_those_of_their_weights_where_they_are_used() -> (
    None
):
    spec = ActionSpec(("r0c0", "r1c0"), ("mlp", "widen_whole"))
    features = {
        "r0c0": Features.at_sink(torch.zeros(3, 6)),
        "r1c0": Features(torch.zeros(3, 6), torch.zeros(3, 5)),
    }
    catalog = BlueprintCatalog("mlp", PLACES, BLUEPRINTS, spec)
    found = catalog.flops(features, catalog.parameters())
    body = BLUEPRINTS.get("mlp", "mlp").build(6)
    weights = sum(p.numel() for p in body.parameters() if p.dim() == 2)
    assert found.tolist() == [[2 * weights, 0], [0, 2 * (5 * 4 + 4 * 6)]]


def test_widenings_of_all_sizes_have_the_operations_of_their_own_bodies() -> None:
    """Though one body is run for all of them."""
    names = tuple(SHARES)
    features = {"r1c0": Features(torch.zeros(3, 6), torch.zeros(3, 5))}
    of_all = BlueprintCatalog(
        "mlp", PLACES[1:], BLUEPRINTS, ActionSpec(("r1c0",), names)
    )
    found = of_all.flops(features, of_all.parameters())
    offered = np.flatnonzero(found[0])
    assert len(offered) > 3
    for b in offered:
        alone = BlueprintCatalog(
            "mlp", PLACES[1:], BLUEPRINTS, ActionSpec(("r1c0",), names[b : b + 1])
        )
        assert found[0, b] == alone.flops(features, alone.parameters())[0, 0]


def test_a_body_that_cannot_run_counts_as_nothing_and_is_refused_only_when_it_is_planted() -> (
    None
):
    registry = BlueprintRegistry()
    registry.register("mlp", "wrong", parameters=lambda channels: 7 * channels)(
        lambda channels: nn.Linear(6, channels)
    )
    features = {"r0c0": Features.at_sink(torch.zeros(3, 5))}
    spec = ActionSpec(("r0c0",), ("wrong",))
    catalog = BlueprintCatalog("mlp", [Place("r0c0", 5)], registry, spec)
    assert catalog.flops(features, catalog.parameters()) == 0


def test_the_env_knows_the_operations_of_its_hosts_and_shows_them() -> None:
    with rig(env={"slots": ["r0", "r2"]}) as world:
        choices = world.env.choices
        assert choices.host_flops == HOST_FLOPS
        assert world.value("host_flops") == pytest.approx(
            math.log2(1 + HOST_FLOPS) / 20
        )
        assert world.value("added_flops") == world.value("r0c0/flops") == 0
        shown = world.value("r0c0/conv_light/flops_share")
        assert shown == pytest.approx(math.log1p(2 * 9 * 3 * 3 * 64 / HOST_FLOPS))
        assert world.value("r2c0/conv_light/flops_share") == 0  # it does not fit
        world.grow("r0c0", S.GERMINATED, "conv_light")
        assert (
            world.value("r0c0/flops")
            == world.value("added_flops")
            == pytest.approx(shown)
        )


def test_rent_in_flops_is_for_what_seeds_compute() -> None:
    by_size, by_work = rules(), rules(reward={"rent_in": "flops"})
    seed = np.array([[10, 80]]), np.array([[900.0, 100.0]])
    assert by_size.share(*seed).tolist() == [
        [10 / 200, 80 / 200]
    ]  # a host counts as 200 parameters at least
    assert by_work.share(*seed).tolist() == [[0.9, 0.1]]
    with rig(reward={"rent_in": "flops", "rent_rate": 0.2}) as world:
        world.grow("r0c0", S.BLENDING, "conv_light")
        alpha = world.slot("r0c0").alpha
        assert 0 < alpha < 1
        share = alpha * 2 * 9 * 3 * 3 * 64 / HOST_FLOPS
        assert world.value("rent") == pytest.approx(0.2 * math.log1p(share), rel=1e-5)
        assert world.env.reward_terms["rent"][0] == pytest.approx(
            -0.2 * math.log1p(share) / 8
        )


@pytest.mark.parametrize(
    ("budget", "planted", "possible"),
    [
        (None, (-1, -1), [True, True]),
        (0.9, (-1, -1), [True, True]),
        (0.5, (-1, -1), [False, True]),
        (1.0, (0, -1), [False, True]),
        (0.95, (0, -1), [False, False]),
    ],
)
def test_a_budget_in_flops_limits_what_is_planted(
    budget: float | None, planted: tuple[int, ...], possible: list[bool]
) -> None:
    found = rules(env={"flop_budget": budget}).affordable(holding(*planted))
    assert found[0, 1].tolist() == possible


def test_the_mask_of_an_env_keeps_the_budget_in_flops() -> None:
    with rig(env={"flop_budget": 0.5}) as world:
        mask = world.info["action_mask"]["slot_blueprint"][0]
        shares = world.env.choices.in_hosts(world.env.choices.flops)
        np.testing.assert_array_equal(mask, shares <= 0.5)
        assert mask.any()
        assert not mask.all()


@pytest.mark.parametrize(
    "tables", [{"reward": {"rent_in": "flops"}}, {"env": {"flop_budget": 1.0}}]
)
def test_prices_in_flops_need_a_host_whose_operations_are_known(
    tables: dict[str, Any],
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"not known, so reward.rent_in must be parameters, and env.flop_budget",
    ):
        PlantedVectorEnv(TrainingConfig.parse(tables), SimParams(host_flops=0.0))


def test_shares_of_a_host_whose_operations_are_not_known_are_zero() -> None:
    unknown = rules(host_flops=0.0)
    assert not unknown.choices.in_hosts(unknown.choices.flops).any()


def test_a_planted_seed_costs_two_operations_for_each_parameter_unless_its_law_says_otherwise() -> (
    None
):
    law = SimParams()
    assert law.choices.flops[0].tolist() == [
        2.0 * (size + law.gate_parameters) for size in law.parameters
    ]
    assert law.only(("oak",)).choices.flops.shape == (3, 1)
    given = SimParams(flops=(1.0, 2.0, 3.0, 4.0)).only(("oak", "moss"))
    assert given.choices.flops.tolist() == [[3.0, 1.0]] * 3
    env = PlantedVectorEnv(TrainingConfig.parse({"env": {"n_envs": 2}}), law)
    env.reset(seed=0)
    actions = np.tile(env.action_spec.encode(Op.GERMINATE, "r0c1", "oak"), (2, 1))
    env.step(actions)
    assert env.choices.flops_of(env.state.slots).tolist() == [[0.0, 1300.0, 0.0]] * 2
