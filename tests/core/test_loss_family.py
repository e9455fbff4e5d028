"""Modes that pay for validation loss: the accuracy modes with losses instead, for which lower is better."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from esper.config import ConfigError, RewardConfig, RewardMode, TrainingConfig
from esper.core.action import Op
from esper.core.reward_modes import MODES, Reward
from esper.core.reward_terms import RewardState, Transition
from esper.core.slots import Bools
from esper.core.stage import SeedStage
from esper.core.state import Baseline, EnvState
from esper.env.epoch_loop import EpochLoop
from esper.env.planted_backend import PlantedBackend
from esper.env.planted_law import SimParams
from esper.telemetry.span import Spans

BASELINE = Baseline(
    accuracy=(10.0, 60.0, 80.0), loss=(2.3, 1.1, 0.5), final_loss_std=0.05, episodes=8
)


def state(epoch: int = 2, **nats: float) -> RewardState:
    """A state with these losses in nats; those not given are the baseline's."""
    loss = {
        name: nats.get(name, BASELINE.loss[epoch])
        for name in ("loss", "committed_loss", "all_off_loss")
    }
    return RewardState(
        accuracy=50.0,
        committed=50.0,
        all_off=50.0,
        baseline=50.0,
        **{name: BASELINE.in_stds(np.array(value)) for name, value in loss.items()},
        baseline_loss=BASELINE.in_stds(np.array(BASELINE.loss[epoch])),
        weighted_share=0.0,
        fossil_parameters=0,
        stage=np.array([SeedStage.DORMANT]),
        epochs_in_stage=np.array([0]),
    )


def pay(
    after: RewardState, mode: str, terminated: bool = True, **values: Any
) -> dict[str, Any]:
    config = RewardConfig(mode=mode, **values)  # type: ignore[arg-type]
    return Reward(config, 10).pay(
        Transition(
            after,
            after,
            Op.WAIT,
            True,
            False,
            terminated,
            horizon=2,
            budget=3000.0,
            doubling=1.0,
        )
    )


@pytest.mark.parametrize("mode", ["loss_shaped", "loss_sparse"])
def test_the_loss_benefit_by_hand(mode: str) -> None:
    """0.1 nats below the baseline's 0.5 are 2 standard deviations, worth 0.4."""
    assert pay(state(committed_loss=0.4, loss=0.1), mode)[
        "loss_benefit"
    ] == pytest.approx(0.4)
    assert pay(state(committed_loss=0.7), mode)["loss_benefit"] == pytest.approx(-0.8)
    assert pay(state(committed_loss=0.4), mode, terminated=False)["loss_benefit"] == 0
    assert pay(state(committed_loss=0.4), mode, loss_benefit_scale=2.0)[
        "loss_benefit"
    ] == pytest.approx(1.0)
    early = pay(state(epoch=1, committed_loss=1.0), mode)["loss_benefit"]
    assert early == pytest.approx(0.4), (
        "an episode that ends early is compared with the baseline at that epoch"
    )


percent, flag = st.floats(0, 100), st.booleans()
OF_ACCURACY = {
    "accuracy": "loss",
    "committed": "committed_loss",
    "all_off": "all_off_loss",
    "baseline": "baseline_loss",
}


@settings(max_examples=15, deadline=None)
@given(
    values=st.fixed_dictionaries(dict.fromkeys(OF_ACCURACY, percent)),
    weighted=st.floats(0, 1e4),
    fossils=st.integers(0, 3000),
    stage=st.sampled_from(list(SeedStage)),
    epochs=st.integers(0, 20),
    op=st.sampled_from(list(Op)),
    outcome=st.tuples(flag, flag, flag),
    mode=st.sampled_from(["shaped", "sparse"]),
)
def test_a_loss_mode_is_the_accuracy_mode_with_the_negative_loss_in_place_of_accuracy(
    values: dict[str, float],
    weighted: float,
    fossils: int,
    stage: SeedStage,
    epochs: int,
    op: Op,
    outcome: tuple[bool, bool, bool],
    mode: str,
) -> None:
    losses = {OF_ACCURACY[name]: 100 - value for name, value in values.items()}
    after = RewardState(
        **values,
        **losses,
        weighted_share=weighted,
        fossil_parameters=fossils,
        stage=np.array([stage]),
        epochs_in_stage=np.array([epochs]),
    )
    step = Transition(
        state(), after, op, *outcome, horizon=30, budget=3000.0, doubling=1.0
    )
    weights = {"loss_benefit_scale": 10.0, "loss_contribution_potential": 0.05}
    plain = Reward(RewardConfig(mode=mode), 10).pay(step)  # type: ignore[arg-type]
    loss = Reward(RewardConfig(mode=f"loss_{mode}", **weights), 10).pay(step)  # type: ignore[arg-type]
    assert {name.removeprefix("loss_"): float(term) for name, term in loss.items()} == {
        name: pytest.approx(float(term), abs=1e-9) for name, term in plain.items()
    }


class ScriptedHosts(PlantedBackend):
    """One host whose losses are given by the number of its epochs: with everything on, and with every seed off."""

    def __init__(self, *losses: tuple[float, float]) -> None:
        super().__init__(SimParams(), 1, len(losses) - 1, 1)
        self.losses = losses

    def measure(self, active: Bools, state: EnvState) -> None:
        state.loss[:], state.all_off_loss[:] = self.losses[int(state.epoch[0])]
        state.committed_loss[:] = state.loss


def tracked(*losses: tuple[float, float]) -> Iterator[EnvState]:
    """The state of the env after each epoch of a scripted host; the first losses are those before any training."""
    hosts, config = ScriptedHosts(*losses), TrainingConfig()
    loop = EpochLoop(
        hosts, config, [len(losses) - 1], hosts.law.spec, Spans(marks=False)
    )
    return itertools.islice(loop.without_growth(0), 1, None)


losses = st.floats(0.01, 2.29)


@pytest.mark.trap(29)
@settings(max_examples=15, deadline=None)
@given(
    first=losses, second=losses, mode=st.sampled_from(["loss_shaped", "loss_sparse"])
)
def test_a_fall_of_the_tracked_loss_is_paid_and_not_charged(
    first: float, second: float, mode: str
) -> None:
    assume(abs(first - second) > 1e-6)
    paid = []
    for now in tracked((2.3, 2.3), (first, first), (second, second)):
        nats = {"loss": now.loss.item(), "committed_loss": now.committed_loss.item()}
        paid.append(float(pay(state(**nats), mode)["loss_benefit"]))
    fell = now.loss_ago[0, 0] > now.loss[0]
    assert (paid[1] > paid[0]) == fell == (second < first)
    assert (paid[1] > 0) == (now.loss[0] < BASELINE.loss[-1])


def test_a_broken_network_is_as_bad_as_an_untrained_one_and_no_reward_is_infinite() -> (
    None
):
    nats = np.array([0.5, 2.3, 6.6, 1e30, math.inf, math.nan])
    assert BASELINE.in_stds(nats) == pytest.approx([10.0, 46.0, 46.0, 46.0, 46.0, 46.0])
    for broken in (math.inf, math.nan):
        paid = pay(
            state(committed_loss=broken, all_off_loss=broken, loss=broken),
            "loss_shaped",
        )
        assert paid["loss_benefit"] == pytest.approx((10 - 46) / 5)
        assert all(math.isfinite(term) for term in paid.values())


@pytest.mark.finding("M15")
def test_the_config_accepts_every_mode_and_no_other() -> None:
    assert get_args(RewardMode) == tuple(MODES)
    for mode in MODES:
        assert TrainingConfig.parse({"reward": {"mode": mode}}).reward.mode == mode
    with pytest.raises(ConfigError) as refused:
        TrainingConfig.parse({"reward": {"mode": "loss"}})
    message = str(refused.value)
    assert message.startswith("reward.mode: ")
    assert all(f"'{mode}'" in message for mode in MODES)
    assert "not 'loss'" in message


@pytest.mark.finding("M15")
def test_a_loss_mode_needs_hosts_to_measure_a_standard_deviation_from() -> None:
    one = {"env": {"baseline_episodes": 1}}
    for mode in MODES:
        tables = {**one, "reward": {"mode": mode}}
        if mode.startswith("loss_"):
            with pytest.raises(ConfigError) as refused:
                TrainingConfig.parse(tables)
            assert str(refused.value).startswith(f"reward.mode = '{mode}' ")
            assert "env.baseline_episodes must be 2 or more, not 1" in str(
                refused.value
            )
            two = {**tables, "env": {"baseline_episodes": 2}}
            assert TrainingConfig.parse(two).reward.mode == mode
        else:
            assert TrainingConfig.parse(tables).reward.mode == mode
