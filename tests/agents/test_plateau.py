"""The controller `plateau`: it plants when validation stalls, and decides all else as the heuristic does."""

import numpy as np
import pytest
from numpy.typing import NDArray

from esper.agents.controller import EnvView
from esper.agents.heuristic import PlateauController
from esper.config import TrainingConfig
from esper.core.action import Op
from esper.env.planted import PlantedVectorEnv
from esper.run.rollout import play_round
from tests.agents.control_helpers import LAYOUT, SPEC, S, World

WINDOW = 15
"""Epochs of a plateau: a tenth of 150."""


def plateau(horizon: int = LAYOUT.horizon, **settings: float) -> PlateauController:
    config = TrainingConfig.parse({"plateau": settings})
    layout = type(LAYOUT)(LAYOUT.slots, LAYOUT.blueprints, horizon)
    made = PlateauController(SPEC, layout, 1, config=config)
    made.begin()
    return made


def ask(rule: PlateauController, world: World, epoch: int, best: float) -> str:
    """Returns the op after this epoch, with this best accuracy, pp."""
    world.plateau(epoch)
    world.base["best_accuracy"] = best / 100
    return world.ask(rule)[0]


def ops(rule: PlateauController, best: list[float]) -> list[str]:
    """Returns the ops of a world whose best accuracy, pp, is as given at each decision; nothing stays planted."""
    return [ask(rule, World(), epoch, accuracy) for epoch, accuracy in enumerate(best)]


def test_plateau_waits_while_the_host_still_improves() -> None:
    """A rise of 0.6 pp in 15 epochs is above the margin of 0.5 pp."""
    assert set(ops(plateau(), [50 + 0.04 * epoch for epoch in range(60)])) == {"WAIT"}


def test_plateau_plants_when_the_best_accuracy_has_stalled() -> None:
    """It rises by 1 pp an epoch until epoch 10, and by 0.4 pp in all after that, which is within the margin."""
    best = [
        min(40 + epoch, 50) + min(0.02 * max(epoch - 10, 0), 0.4) for epoch in range(27)
    ]
    assert ops(plateau(), best) == ["WAIT"] * (10 + WINDOW) + ["GERMINATE", "WAIT"]


@pytest.mark.parametrize(
    ("margin", "op"), [(0.0, "WAIT"), (0.2, "WAIT"), (0.4, "GERMINATE")]
)
def test_the_margin_of_a_plateau_is_a_setting(margin: float, op: str) -> None:
    """The best accuracy rises by 0.3 pp in the window."""
    assert (
        ops(plateau(margin=margin), [50 + 0.02 * epoch for epoch in range(WINDOW + 1)])[
            -1
        ]
        == op
    )


@pytest.mark.parametrize(
    ("horizon", "settings", "epochs"),
    [
        (150, {}, 15),
        (20, {}, 3),
        (20, {"min_window_epochs": 5}, 5),
        (20, {"window": 0.5}, 10),
    ],
)
def test_a_plateau_is_a_share_of_the_episode_and_some_epochs_at_least(
    horizon: int, settings: dict[str, float], epochs: int
) -> None:
    assert plateau(horizon, **settings).window == epochs


def test_after_a_planting_plateau_waits_for_the_next_plateau() -> None:
    """The host does not improve at all, and the seed is gone again at once."""
    found = ops(plateau(), [50.0] * (3 * WINDOW + 1))
    assert [epoch for epoch, op in enumerate(found) if op == "GERMINATE"] == [
        WINDOW,
        2 * WINDOW,
        3 * WINDOW,
    ]


def test_a_seed_that_lifts_the_host_is_followed_by_another_only_when_that_stalls() -> (
    None
):
    rise = (
        [50.0] * (WINDOW + 1)
        + [51.0 + epoch for epoch in range(20)]
        + [70.0] * (WINDOW + 1)
    )
    found = ops(plateau(), rise)
    planted = [epoch for epoch, op in enumerate(found) if op == "GERMINATE"]
    assert planted == [WINDOW, WINDOW + 20 + WINDOW]


def test_plateau_advances_and_keeps_seeds_whether_the_host_improves_or_not() -> None:
    rule, world = plateau(), World()
    seed = {"gate_passed": 1.0, "blueprint": 2.0}
    for epoch, (stage, op) in enumerate(
        ((S.GERMINATED, "ADVANCE"), (S.BLENDING, "ADVANCE"), (S.HOLDING, "FOSSILIZE"))
    ):
        world.put("r0c0", stage, contribution=0.3, contribution_error=0.01, **seed)
        assert ask(rule, world, epoch, 50.0 + epoch) == op


def test_plateau_plants_nothing_in_the_last_third() -> None:
    best = [50 + epoch for epoch in range(96)] + [145.0] * 54
    assert "GERMINATE" not in ops(plateau(), best)


def test_what_plateau_remembers_is_part_of_the_memory_of_an_episode() -> None:
    """One that is resumed in the middle of a plateau plants as if nothing had happened; a new episode begins anew."""
    first, other = plateau(), plateau()
    ops(first, [50.0] * WINDOW)
    other.load_memory_state(first.memory_state())
    assert ask(other, World(), WINDOW, 50.0) == "GERMINATE"
    first.begin()
    assert ask(first, World(), WINDOW, 50.0) == "WAIT"


def test_plateau_grows_simulated_hosts_later_than_from_the_start() -> None:
    """They improve for long: by 2 pp in a plateau of four epochs half-way."""
    sections = {
        "task": {"name": "planted"},
        "env": {"n_envs": 4, "episode_length": 40},
        "plateau": {"margin": 2.0},
    }
    config = TrainingConfig.parse(sections)
    births: list[int] = []

    class Noted(PlateauController):
        """Notes the epochs in which a seed is planted."""

        def choose(self, env: int, view: EnvView) -> NDArray[np.int64]:
            action = super().choose(env, view)
            if action[0] == Op.GERMINATE:
                births.append(view.epoch)
            return action

    env = PlantedVectorEnv(config)
    rule = Noted(env.action_spec, env.layout, 4, config=config)
    play_round(env, rule, seed=0)
    assert births
    assert min(births) >= rule.window == 4
    assert max(births) <= 0.7 * 40
