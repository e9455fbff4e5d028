"""Rewards of real episodes are those of the measurements."""

import numpy as np
import pytest

from esper.agents.controller import RandomController
from esper.core.reward_modes import MODES, POTENTIALS
from esper.core.stage import SeedStage
from esper.training.counterfactual import ALL_OFF
from tests.core_helpers import DAMAGE, rig
from tests.selection import slow_except

S = SeedStage


@pytest.mark.trap(21)
@pytest.mark.parametrize("mode", slow_except(list(MODES)[:2], MODES))
@pytest.mark.parametrize("broken", [(), (3, 9)], ids=["healthy", "rolled back"])
def test_a_whole_episode_telescopes_and_terms_sum_to_the_reward(
    mode: str, broken: tuple[int, ...]
) -> None:
    sections = {
        "env": {"one_incubating": False, "baseline_episodes": 2},
        "task": {"samples_per_epoch": 256},
    }
    with rig(
        n_envs=2, horizon=14, reward={"mode": mode, "gamma": 0.9}, **sections
    ) as world:
        chooser = RandomController(
            world.env.action_spec, world.env.layout, 2, run_seed=6
        )
        chooser.begin()
        discounted = {name: np.zeros(2) for name in MODES[mode] if name in POTENTIALS}
        moved = dict.fromkeys(discounted, 0.0)
        for step in range(14):
            if step in broken:
                DAMAGE["NaN weight"](world.training(0))
            world.step(
                dict(
                    enumerate(chooser.act(world.observation, world.info["action_mask"]))
                )
            )
            terms = world.info["reward_terms"]
            assert set(terms) == set(MODES[mode])
            np.testing.assert_array_equal(sum(terms.values()), world.rewards)
            assert (terms["governor"] == [-10.0 * (step in broken), 0.0]).all()
            for name, total in discounted.items():
                total += 0.9**step * terms[name]
                moved[name] += float(np.abs(terms[name]).sum())
        assert world.terminated.all()
        for total in discounted.values():
            np.testing.assert_allclose(total, 0.0, atol=1e-9)
        assert all(amount > 0.01 for amount in moved.values())


@pytest.mark.trap(25)
def test_the_benefit_is_what_the_committed_network_leads_by() -> None:
    with rig(horizon=6) as world:
        world.grow("r0c0", S.FOSSILIZED)
        assert world.terminated.all()
        committed = float(world.info["committed_accuracy"][0])
        helper = world.host().counterfactual
        assert committed == helper.accuracy(helper.committed)
        assert world.info["reward_terms"]["benefit"][0] == pytest.approx(
            (committed - 10.0) / 10
        )


LOSS = {"reward": {"mode": "loss_shaped"}, "env": {"baseline_episodes": 2}}


@pytest.mark.trap(25)
def test_the_loss_benefit_is_what_the_committed_network_leads_by() -> None:
    """A fossil counts, a seed that only holds does not; 2.3 nats and 0.1 are the rig's baseline."""
    with rig(horizon=11, **LOSS) as world:
        world.grow("r0c0", S.FOSSILIZED)
        world.grow("r1c0", S.HOLDING)
        assert world.terminated.all()
        helper = world.host().counterfactual
        committed = helper.loss_of(helper.committed)
        assert (
            len({committed, helper.loss_of(helper.all_on), helper.loss_of(ALL_OFF)})
            == 3
        )
        assert world.info["reward_terms"]["loss_benefit"][0] == pytest.approx(
            (2.3 - committed) / 0.1 / 5
        )


def test_the_loss_contribution_is_what_all_seeds_take_off_the_loss() -> None:
    with rig(horizon=14, task={"samples_per_epoch": 512}, **LOSS) as world:
        world.grow("r0c0", S.FOSSILIZED)
        world.grow("r1c0", S.HOLDING)
        before = world.env.reward.stored["loss_contribution_potential"].copy()
        world.step()
        helper = world.host().counterfactual
        off, on = (min(helper.loss_of(name), 2.3) for name in (ALL_OFF, helper.all_on))
        assert off != on
        paid = world.info["reward_terms"]["loss_contribution_potential"]
        assert paid == pytest.approx(0.995 * 0.1 * (off - on) / 0.1 - before)


def test_after_a_rollback_the_loss_reward_reads_the_restored_network() -> None:
    """Measurements of the bad epoch are dropped: accuracy and loss are those of the committed network."""
    with rig(
        horizon=14,
        governor={"snapshot_every": 1},
        task={"samples_per_epoch": 512},
        **LOSS,
    ) as world:
        world.grow("r0c0", S.FOSSILIZED)
        world.grow("r1c0", S.HOLDING)
        good = world.measurement()
        DAMAGE["NaN weight"](world.training())
        world.step()
        assert world.info["reward_terms"]["governor"][0] == -10
        fleet = world.env.state
        assert fleet.loss[0] == fleet.committed_loss[0] == good.committed_loss
        assert fleet.all_off_loss[0] == good.all_off_loss
        off, on = (min(loss, 2.3) for loss in (good.all_off_loss, good.committed_loss))
        potential = world.env.reward.stored["loss_contribution_potential"][0]
        assert potential == pytest.approx(0.1 * (off - on) / 0.1)


@pytest.mark.trap(20)
@pytest.mark.parametrize("mode", ["shaped", "simplified", "loss_shaped"])
def test_a_refused_action_is_charged_as_refused_and_gains_no_stage(mode: str) -> None:
    """The gate requires five epochs in TRAINING: the reward is that of the refused action."""
    gates = {
        "min_training_epochs": 5,
        "min_gradient_health": 0.0,
        "trial_standard_errors": 1000.0,
    }
    sections = {
        "reward": {"mode": mode, "gamma": 1.0},
        "env": {"baseline_episodes": 2, "gates": gates},
    }
    with rig(horizon=30, **sections) as world:
        world.do("GERMINATE", "r0c0", "norm")
        world.do("ADVANCE", "r0c0")
        assert world.slot("r0c0").stage is S.TRAINING
        world.do("ADVANCE", "r0c0")
        assert world.slot("r0c0").stage is S.TRAINING
        assert world.value("last_op_succeeded") == 0
        terms = world.info["reward_terms"]
        assert terms["action_cost"][0] == -0.01
        # one more epoch of a dwell of 2: 0.1 · 0.9 · (3.5 − 2) / 2
        assert terms["stage_potential"][0] == pytest.approx(0.0675)
