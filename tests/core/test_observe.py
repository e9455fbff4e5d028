"""Observations of an env: always finite, and true to the state."""

import math

import numpy as np
import pytest

from esper.agents.controller import RandomController
from esper.core.observation import symlog
from esper.core.stage import STAGES, SeedStage
from tests.core_helpers import DAMAGE, EASY_GATES, Rig, digits, rig
from tests.selection import slow_except

S = SeedStage


def check(world: Rig) -> None:
    space = world.env.single_observation_space
    for index, row in enumerate(world.observation):
        assert np.isfinite(row).all()
        assert space.contains(row)
        for slot in world.env.action_spec.slots:
            flags = [
                world.value(f"{slot}/stage_{stage.name.lower()}", index)
                for stage in STAGES
            ]
            assert sum(flags) == 1
            assert STAGES[flags.index(1)] is world.slot(slot, index).stage
        counts = [world.value(f"count_{stage.name.lower()}", index) for stage in STAGES]
        assert sum(counts) == pytest.approx(1)
        epoch, horizon = world.training(index).epoch, world.env.horizon
        assert world.value("epoch", index) == pytest.approx(epoch / horizon)
        assert world.value("epochs_left", index) == pytest.approx(
            math.log1p(horizon - epoch)
        )
        assert world.value("rent", index) == pytest.approx(rent(world, index), rel=1e-5)


def rent(world: Rig, index: int) -> float:
    weighted = sum(slot.alpha * slot.parameters for slot in world.training(index).sites)
    rate = world.env.config.reward.rent_rate
    return min(rate * math.log(1 + weighted / 277), 0.6)


@pytest.mark.finding("L8")
def test_the_average_of_gradient_ratios_has_the_decay_of_the_config() -> None:
    ratios: dict[float, list[float]] = {}
    for decay in (0.0, 0.75, 1.0):
        gates = {**EASY_GATES, "gradient_ratio_decay": decay}
        with rig(horizon=8, env={"gates": gates}) as world:
            world.grow("r0c0", S.TRAINING)
            found = ratios.setdefault(decay, [])
            for _ in range(4):
                found.append(float(world.slot("r0c0").gradient_ratio or 0))
                world.step()
    first, *later = ratios[
        0.0
    ]  # what each epoch measured: training does not depend on how it is averaged
    assert first > 0
    assert len(set(later)) == 3
    assert ratios[1.0] == [first] * 4
    average = first
    for measured, found in zip(later, ratios[0.75][1:], strict=True):
        average = 0.75 * average + 0.25 * measured
        assert found == pytest.approx(average, rel=1e-9)


@pytest.mark.parametrize("damage", slow_except(["NaN weight"], DAMAGE))
def test_an_observation_is_finite_whatever_happens_to_the_host(damage: str) -> None:
    with rig(n_envs=2, horizon=14, governor={"max_rollbacks": 10}) as world:
        chooser = RandomController(
            world.env.action_spec, world.env.layout, 2, run_seed=5
        )
        chooser.begin()
        for step in range(14):
            if step in (3, 4, 9):
                DAMAGE[damage](world.training(0))
            world.step(
                dict(
                    enumerate(chooser.act(world.observation, world.info["action_mask"]))
                )
            )
            check(world)
            assert np.isfinite(world.rewards).all()


def test_what_is_known_before_the_first_epoch_by_hand() -> None:
    sizes = {"samples_per_epoch": 256, "batch_size": 32, "learning_rate": 0.25}
    with rig(horizon=8, task=sizes) as world:
        samples = len(digits().train.y)
        # By value: 8 epochs of 8 steps, 8×8 pixels, 10 classes, a price of rent for 277 parameters in 277.
        expected = {
            "epochs": math.log2(8) / 10,
            "updates_left": math.log2(65) / 10,
            "samples": math.log2(samples) / 10,
            "samples_per_parameter": math.log2(samples / 277) / 10,
            "host_parameters": math.log2(277) / 10,
            "first_parameters": math.log2(277) / 10,
            "inputs": math.log2(64) / 10,
            "classes": math.log2(10) / 10,
            "learning_rate": math.log2(0.25) / 10,
            "price": math.log1p(10 * 0.05 * math.log(2)),
            "r0c0/width": math.log2(3) / 10,
            "r0c1/width": math.log2(6) / 10,
            "r0c0/width_ratio": 0.0,
        }
        for name, value in expected.items():
            assert world.value(name) == pytest.approx(value, rel=1e-6), name
        for name in ("updates_known", "samples_known", "chance_known"):
            assert world.value(name) == 1
        world.step()
        assert world.value("updates_left") == pytest.approx(math.log2(57) / 10)


def test_losses_are_told_beside_a_guess_and_the_start() -> None:
    with rig(horizon=8) as world:
        first = world.measurement().loss
        assert world.value("validation_loss_left") == pytest.approx(math.log(2))
        assert world.value("train_measured") == world.value("loss_gap") == 0
        before = first
        for _ in range(3):
            last = before
            before = world.measurement().loss
            world.step()
        now = world.measurement()
        assert last != before
        chance = math.log(10)
        expected = {
            "train_loss": math.log1p(now.train_loss / chance),
            "train_loss_left": math.log1p(now.train_loss / first),
            "validation_loss": math.log1p(now.loss / chance),
            "loss_gap": symlog((now.loss - now.train_loss) / chance),
            "loss_slope_1": symlog((now.loss - before) / chance),
            "loss_slope_3": symlog((now.loss - first) / chance / 3),
            "train_measured": 1.0,
        }
        for name, value in expected.items():
            assert world.value(name) == pytest.approx(float(value), abs=1e-6), name


def test_need_is_told_beside_a_guess_where_it_was_measured() -> None:
    slots = {"slots": ["r0c0", "r2"], "need_every": 1}
    with rig(horizon=6, env=slots) as world:
        world.step()
        need = world.slot("r2c0").need
        assert need > 0
        assert world.value("r2c0/need") == pytest.approx(need / math.log(10))
        assert world.value("r2c0/need_measured") == 1
        assert world.value("r0c0/need_measured") == world.value("r0c0/need") == 0


@pytest.mark.parametrize(
    ("mode", "price"), [("shaped", 0.5 * math.log(2)), ("simplified", 0.0)]
)
def test_the_price_of_a_doubling_is_what_the_reward_takes_for_it(
    mode: str, price: float
) -> None:
    with rig(horizon=8, reward={"mode": mode}) as world:
        assert world.value("price") == pytest.approx(math.log1p(price))
        share = math.expm1(world.value("r0c0/conv_light/size_share"))
        of_seed = price * math.log2(1 + share)
        assert world.value("r0c0/conv_light/price") == pytest.approx(
            math.log1p(of_seed), rel=1e-5
        )


def test_in_a_sparse_mode_the_price_is_that_of_the_budget() -> None:
    with rig(horizon=8, reward={"mode": "sparse"}) as world:
        assert world.value("price") == pytest.approx(math.log1p(10 * 0.1 / 10))


def test_the_rent_in_the_observation_is_what_is_paid() -> None:
    with rig(horizon=8) as world:
        world.grow("r0c1", S.HOLDING)
        assert world.value("rent") == pytest.approx(
            -8 * float(world.info["reward_terms"]["rent"][0]), rel=1e-5
        )
        # conv_light on 6 channels: 9·36 + 18 = 342 parameters at alpha 1
        assert world.value("rent") == pytest.approx(
            0.05 * math.log(1 + 342 / 277), rel=1e-5
        )
        assert world.value("added_parameters") == pytest.approx(342 / 2770, rel=1e-5)
        assert world.value("fossil_parameters") == 0
        world.do("FOSSILIZE", "r0c1")
        assert world.value("fossil_parameters") == pytest.approx(342 / 2770, rel=1e-5)


def test_slope_and_contribution() -> None:
    with rig(horizon=8) as world:
        world.grow("r0c0", S.HOLDING)
        now = world.measurement()
        helper = world.host().counterfactual
        assert world.value("committed_accuracy") == pytest.approx(now.committed / 100)
        paired = helper.contribution("r0c0")
        assert paired is not None
        assert paired.difference == pytest.approx(now.accuracy - now.all_off)
        assert world.value("r0c0/contribution") == pytest.approx(
            np.clip(paired.difference, -10, 10) / 10, abs=1e-6
        )
        assert world.value("r0c0/contribution_measured") == 1
        assert world.value("r0c0/epochs_since_measured") == 0
        assert world.value("r1c0/contribution_measured") == 0
        before = world.value("validation_accuracy")
        world.step()
        rise = world.value("validation_accuracy") - before
        assert world.value("accuracy_slope_1") == pytest.approx(rise, abs=1e-6)
        assert world.value("best_accuracy") >= world.value("validation_accuracy")


def test_an_interaction_is_kept_while_it_is_not_measured_again() -> None:
    """It is measured every second epoch; in between, the last value stays."""
    with rig(
        horizon=20, env={"counterfactual_every": 2}, task={"samples_per_epoch": 256}
    ) as world:
        world.grow("r0c0", S.HOLDING)
        world.grow("r0c1", S.HOLDING)
        measured: list[float] = []
        kept: list[float] = []
        world.step()
        for _ in range(2):
            for values in (measured, kept):
                world.step()
                values.append(world.slot("r0c0").interaction)
        assert any(measured)
        assert kept == measured
