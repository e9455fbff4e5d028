"""Gradient statistics of an epoch, as written into the arrays."""

import pytest

from esper.config import TrainingConfig
from esper.data.tasks import load_task
from esper.env.vector_env import GrowthVectorEnv
from esper.spaces.action import Op
from esper.training.metrics import GradientSummary
from tests.core_helpers import flat_baseline


@pytest.mark.parametrize(
    ("vanishing", "exploding"), [(0.5, 0.8), (0.0, 1.0), (1.0, 0.0)]
)
def test_gradient_health_is_weighted_by_the_config(
    vanishing: float, exploding: float
) -> None:
    """A fifth of the tensors vanish and three tenths explode; the operator's own weights give 0.66."""
    own = 1 - 0.5 * 0.2 - 0.8 * 0.3
    summary = GradientSummary(
        norm=1.0, elements=1.0, health=own, vanishing=0.2, exploding=0.3, not_finite=0.0
    )
    assert summary.health_by(0.5, 0.8) == own
    assert summary.health_by(vanishing, exploding) == pytest.approx(
        1 - vanishing * 0.2 - exploding * 0.3
    )


@pytest.mark.parametrize(
    ("limit", "exploding", "health"), [(10.0, 0.0, 1.0), (1e-12, 1.0, 0.75)]
)
def test_the_config_says_which_gradients_explode(
    limit: float, exploding: float, health: float
) -> None:
    tables = {
        "task": {"samples_per_epoch": 64, "exploding_gradient": limit},
        "env": {"n_envs": 1, "episode_length": 6, "gates": {"exploding_weight": 0.25}},
    }
    env = GrowthVectorEnv(
        load_task("digits"), TrainingConfig.parse(tables), baseline=flat_baseline(6)
    )
    env.reset(seed=0)
    spec, slot = env.action_spec, env.action_spec.slots[0]
    for action in (
        spec.encode(Op.GERMINATE, slot, "conv_light"),
        spec.encode(Op.ADVANCE, slot),
    ):
        env.step(action[None])
    measured = env.state.slots
    assert (measured.exploding[0, 0], measured.gradient_health[0, 0]) == (
        exploding,
        health,
    )
    env.close()
