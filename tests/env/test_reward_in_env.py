"""The reward of real episodes: what is measured is what is paid."""

import numpy as np
import pytest

from esper.control.random import RandomController
from esper.seeds.stage import SeedStage
from tests.core_helpers import DAMAGE, rig

S = SeedStage


@pytest.mark.parametrize("mode", ["shaped", "simplified", "advantage", "sparse"])
@pytest.mark.parametrize("broken", [(), (3, 9)], ids=["healthy", "rolled back"])
def test_trap_21_a_whole_episode_telescopes_and_terms_sum_to_the_reward(mode: str, broken: tuple[int, ...]) -> None:
    with rig(n_envs=2, horizon=14, reward={"mode": mode, "gamma": 0.9}, env={"one_incubating": False}) as world:
        chooser = RandomController(world.env.action_spec, world.env.layout, 2, run_seed=2)
        chooser.begin()
        discounted = {"stage_potential": np.zeros(2), "contribution_potential": np.zeros(2)}
        paid_something = False
        for step in range(14):
            if step in broken:
                DAMAGE["NaN weight"](world.training(0))
            world.step(dict(enumerate(chooser.act(world.observation, world.info["action_mask"]))))
            terms = world.info["reward_terms"]
            np.testing.assert_allclose(sum(terms.values()), world.rewards, atol=1e-12)
            assert (terms["governor"] == [-10.0 * (step in broken), 0.0]).all()
            for name, total in discounted.items():
                total += 0.9**step * terms.get(name, 0.0)
                paid_something |= bool(np.abs(terms.get(name, np.zeros(2))).max() > 0)
        assert world.terminated.all()
        for total in discounted.values():
            np.testing.assert_allclose(total, 0.0, atol=1e-9)
        assert paid_something == (mode in ("shaped", "simplified"))


def test_trap_25_the_benefit_is_what_the_committed_network_leads_by() -> None:
    with rig(horizon=6) as world:
        world.grow("r0c0", S.FOSSILIZED)
        assert world.terminated.all()
        committed = float(world.info["committed_accuracy"][0])
        assert committed == world.episode().counterfactual.accuracy("committed")
        assert world.info["reward_terms"]["benefit"][0] == pytest.approx((committed - 10.0) / 10)


def test_a_seed_that_only_holds_is_not_in_the_benefit() -> None:
    with rig(horizon=5) as world:
        world.grow("r0c0", S.HOLDING)
        helper = world.episode().counterfactual
        assert world.terminated.all()
        expected = (helper.accuracy("all off") - 10.0) / 10
        assert world.info["reward_terms"]["benefit"][0] == pytest.approx(expected)
