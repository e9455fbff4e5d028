"""Reward modes: their terms, and the potential kept between steps."""

from esper.config import RewardConfig
from esper.core.reward_modes import MODES, Reward
from esper.core.stage import SeedStage
from tests.core.reward_helpers import DWELL, pay, state, transition

S = SeedStage


def test_the_terms_of_each_mode() -> None:
    named = {mode: set(pay(transition(state()), mode)) for mode in MODES}
    assert named == {
        "shaped": {
            "benefit",
            "rent",
            "stage_potential",
            "contribution_potential",
            "action_cost",
            "governor",
        },
        "simplified": {"benefit", "stage_potential", "action_cost", "governor"},
        "advantage": {"advantage", "rent", "governor"},
        "sparse": {"benefit", "fossil_cost", "governor"},
        "loss_shaped": {
            "loss_benefit",
            "rent",
            "stage_potential",
            "loss_contribution_potential",
            "action_cost",
            "governor",
        },
        "loss_sparse": {"loss_benefit", "fossil_cost", "governor"},
    }


def test_reset_forgets_the_stored_potential() -> None:
    reward = Reward(RewardConfig(), DWELL)
    first = reward.pay(transition(state((S.HOLDING, 3), accuracy=70.0)))
    assert reward.potential > 0
    reward.reset()
    assert reward.potential == 0
    assert reward.pay(transition(state((S.HOLDING, 3), accuracy=70.0))) == first
