"""Reward terms against numbers computed by hand."""

import math

import pytest

from esper.config import ConfigError, Durations, RewardConfig, TrainingConfig
from esper.core.action import Op
from esper.core.reward_modes import Reward
from esper.core.stage import SeedStage
from tests.core.reward_helpers import DWELL, pay, state, transition

S = SeedStage


def test_the_benefit_is_paid_at_termination_in_tenths_of_a_point() -> None:
    after = state(committed=88.8, baseline=83.9, accuracy=99.0)
    assert pay(transition(after))["benefit"] == 0
    assert pay(transition(after, terminated=True))["benefit"] == pytest.approx(0.49)
    worse = state(committed=10.0, baseline=83.9)
    assert pay(transition(worse, terminated=True))["benefit"] == pytest.approx(-7.39)


@pytest.mark.parametrize(
    ("share", "whole_episode"),
    [
        (0.0, 0.0),
        (1.0, 0.05 * math.log(2)),
        (0.5, 0.05 * math.log(1.5)),
        (18.9, 0.05 * math.log(19.9)),
        (19.2, 0.05 * math.log(20.2)),
        (1e9, 0.6),
    ],
)
def test_the_rent_of_a_size_over_an_episode(share: float, whole_episode: float) -> None:
    paid = pay(transition(state(weighted_share=share)))["rent"]
    assert 30 * paid == pytest.approx(-whole_episode, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("stage", "epochs", "phi"),
    [
        (S.DORMANT, 9, 0.0),
        (S.GERMINATED, 0, 1.0),
        (S.GERMINATED, 5, 1.45),
        (S.GERMINATED, 10, 1.9),
        (S.GERMINATED, 99, 1.9),
        (S.TRAINING, 0, 2.0),
        (S.TRAINING, 4, 2.54),
        (S.TRAINING, 10, 3.35),
        (S.BLENDING, 5, 4.4),
        (S.BLENDING, 10, 5.3),
        (S.HOLDING, 0, 5.5),
        (S.HOLDING, 10, 5.95),
        (S.FOSSILIZED, 0, 6.0),
        (S.FOSSILIZED, 50, 6.0),
        (S.PRUNED, 3, 0.0),
        (S.EMBARGOED, 3, 0.0),
        (S.RESETTING, 1, 0.0),
    ],
)
def test_the_stage_potential_of_one_slot(
    stage: SeedStage, epochs: int, phi: float
) -> None:
    paid = pay(transition(state((stage, epochs))))["stage_potential"]
    assert paid == pytest.approx(0.995 * 0.1 * phi)


def test_the_stage_potentials_are_those_of_the_config() -> None:
    after = state((S.TRAINING, DWELL), (S.FOSSILIZED, 2), (S.EMBARGOED, 8))
    phi = (0.0, 1.0, 11.0, 20.0, -5.0)
    paid = pay(transition(after), gamma=1.0, stage_potentials=phi)["stage_potential"]
    assert paid == pytest.approx(0.1 * (1.0 + 0.9 * 10.0 - 5.0))
    paid = pay(transition(after), gamma=1.0, stage_potentials=phi, stage_climb=0.5)[
        "stage_potential"
    ]
    assert paid == pytest.approx(0.1 * (1.0 + 0.5 * 10.0 - 5.0))
    assert Durations.of(TrainingConfig(), 60).stage_dwell == 4
    assert (
        Durations.of(
            TrainingConfig.parse({"reward": {"stage_dwell": 7}}), 60
        ).stage_dwell
        == 7
    )
    with pytest.raises(ConfigError, match=r"reward\.stage_potentials"):
        TrainingConfig.parse({"reward": {"stage_potentials": (1.0, 2.0)}})


@pytest.mark.trap(21)
def test_the_stage_potential_is_the_sum_over_all_slots() -> None:
    after = state((S.TRAINING, 4), (S.FOSSILIZED, 2), (S.DORMANT, 8), (S.BLENDING, 5))
    assert pay(transition(after), gamma=1.0)["stage_potential"] == pytest.approx(
        0.1 * (2.54 + 6.0 + 4.4)
    )


@pytest.mark.parametrize(
    "name", ["contribution_potential", "loss_contribution_potential"]
)
def test_a_potential_that_was_not_measured_stays_as_it_was(name: str) -> None:
    """A step to it pays only the discount, and the next measurement pays the rest."""
    mode = "shaped" if name == "contribution_potential" else "loss_shaped"
    reward = Reward(RewardConfig(mode=mode, gamma=0.5), DWELL)
    known = state(accuracy=60.0, all_off=48.0, loss=8.0, all_off_loss=20.0)
    unknown = state(accuracy=70.0, all_off=math.nan, loss=2.0, all_off_loss=math.nan)
    first = reward.pay(transition(known))[name]
    assert first > 0
    assert reward.pay(transition(unknown))[name] == pytest.approx(-first)
    assert reward.pay(transition(known))[name] == pytest.approx(-first)


@pytest.mark.trap(20)
@pytest.mark.parametrize(
    ("op", "succeeded", "cost"),
    [
        (Op.WAIT, True, 0.0),
        (Op.GERMINATE, True, 0.015),
        (Op.GERMINATE, False, 0.015),
        (Op.ADVANCE, True, 0.001),
        (Op.ADVANCE, False, 0.01),
        (Op.FOSSILIZE, True, 0.001),
        (Op.FOSSILIZE, False, 0.01),
        (Op.PRUNE, True, 0.001),
        (Op.SET_ALPHA_TARGET, True, 0.001),
    ],
)
def test_the_cost_of_an_action_depends_on_its_outcome(
    op: Op, succeeded: bool, cost: float
) -> None:
    paid = pay(transition(state(), op=op, succeeded=succeeded))["action_cost"]
    assert paid == pytest.approx(-cost)


def test_weights_of_terms_are_those_of_the_config() -> None:
    after = state((S.FOSSILIZED, 0), accuracy=60.0, all_off=50.0, weighted_share=1.0)
    paid = pay(
        transition(after, op=Op.GERMINATE, rolled_back=True),
        gamma=1.0,
        rent_rate=1.0,
        rent_cap=9.0,
        stage_potential=2.0,
        contribution_potential=1.0,
        germinate_cost=3.0,
        rollback_penalty=7.0,
    )
    assert paid == {
        "benefit": 0.0,
        "rent": pytest.approx(-math.log(2) / 30),
        "stage_potential": pytest.approx(12.0),
        "contribution_potential": pytest.approx(10.0),
        "action_cost": -3.0,
        "governor": -7.0,
    }
