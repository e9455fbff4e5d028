"""Preferences of an untrained policy, the range of a trained one, and devices."""

import numpy as np
import pytest
import torch

from esper.agents.ppo.agent import PPOAgent
from esper.agents.ppo.network import FREE_HEADS, PolicyNetwork
from esper.agents.ppo.policy import Policy
from esper.config import PPOConfig
from esper.core.action import ALPHA_TARGETS, HEADS, RELEVANT, ActionSpec, Op
from esper.core.observation import ObservationLayout

SPEC = ActionSpec(("r0c0", "r0c1"), ("first", "second", "third"))
LAYOUT = ObservationLayout(SPEC.slots, SPEC.blueprints, horizon=6)


def masks(envs: int) -> dict[str, np.ndarray]:
    """Masks that allow every action."""
    legal = {
        head: np.ones((envs, n), dtype=np.bool_)
        for head, n in zip(HEADS, SPEC.sizes, strict=True)
    }
    return {
        **legal,
        "op_slot": np.ones((envs, len(Op), 2), dtype=np.bool_),
        "slot_blueprint": np.ones((envs, 2, 3), dtype=np.bool_),
    }


def observations(values: np.ndarray) -> np.ndarray:
    """The values with empty slots."""
    values[:, [LAYOUT.index[f"{slot}/blueprint"] for slot in SPEC.slots]] = 0
    return values.astype(np.float32)


def shares(network: PolicyNetwork, head: str, op: Op | None = None) -> np.ndarray:
    """Share of each choice of a head in the steps with this op."""
    policy = Policy(SPEC, LAYOUT, 4000, PPOConfig(width=32), run_seed=1)
    policy.network = network
    policy.begin()
    actions = policy.act(np.zeros((4000, LAYOUT.size), dtype=np.float32), masks(4000))
    if op is not None:
        actions = actions[actions[:, 0] == op]
    place = HEADS.index(head)
    return np.bincount(actions[:, place], minlength=SPEC.sizes[place]) / len(actions)


def test_an_untrained_policy_carries_seeds_through() -> None:
    network = PolicyNetwork(SPEC, PPOConfig(width=32, prior=1.0))
    ops = shares(network, "op")
    assert (
        ops[Op.FOSSILIZE]
        > ops[Op.ADVANCE]
        > ops[Op.WAIT]
        > ops[Op.SET_ALPHA_TARGET]
        > ops[Op.PRUNE]
        > 0
    )
    targets = shares(network, "alpha_target", Op.GERMINATE)
    assert ALPHA_TARGETS[int(targets.argmax())] == 1.0
    np.testing.assert_allclose(
        shares(network, "blueprint", Op.GERMINATE), 1 / 3, atol=0.08
    )


def test_the_preferences_of_an_untrained_policy_are_those_of_the_config() -> None:
    preferences = {
        "prior_advance": 0.0,
        "prior_fossilize": 0.0,
        "prior_prune": 4.0,
        "prior_full_alpha": -4.0,
    }
    network = PolicyNetwork(SPEC, PPOConfig(width=32, **preferences))
    assert shares(network, "op")[Op.PRUNE] > 0.8
    assert shares(network, "alpha_target", Op.GERMINATE)[ALPHA_TARGETS.index(1.0)] < 0.2


@pytest.mark.trap(19)
@pytest.mark.parametrize("place", range(len(FREE_HEADS)), ids=FREE_HEADS)
def test_no_choice_of_another_head_has_a_floor(place: int) -> None:
    network = PolicyNetwork(SPEC, PPOConfig(width=32, prior=0.0))
    with torch.no_grad():
        network.free_heads[-1].bias[sum(network.free_sizes[:place])] = -30.0
    op = next(op for op in Op if FREE_HEADS[place] in RELEVANT[op])
    drawn = shares(network, FREE_HEADS[place], op)
    assert drawn[0] == 0.0
    assert (drawn[1:] > 0).all()


@pytest.mark.trap(26)
def test_entropies_can_reach_both_ends() -> None:
    """A warning about entropy can fire: it is 1 for equal choices and 0 for a certain one."""
    for bias, expected in ((0.0, 1.0), (60.0, 0.0)):
        network = PolicyNetwork(SPEC, PPOConfig(width=32, prior=0.0))
        with torch.no_grad():
            network.op_head[-1].weight.zero_()
            network.op_head[-1].bias[Op.WAIT] = bias
        policy = Policy(SPEC, LAYOUT, 4, PPOConfig(width=32))
        policy.network = network
        _, _, decision = policy.step(
            torch.zeros(4, LAYOUT.size), policy.legal(masks(4))
        )
        torch.testing.assert_close(decision.entropies[:, 0], torch.full((4,), expected))


def test_probabilities_of_ops_depend_on_the_seeds_that_may_be_planted() -> None:
    """A seed that is forbidden counts for nothing, whatever its size; one that is allowed counts."""
    network = PolicyNetwork(SPEC, PPOConfig(width=32))
    with torch.no_grad():
        network.op_head[-1].weight.normal_()

    def offered(size: float, *forbidden: tuple[int, int]) -> float:
        policy = Policy(SPEC, LAYOUT, 1, PPOConfig(width=32))
        policy.network = network
        observation = np.zeros((1, LAYOUT.size), dtype=np.float32)
        scene, _ = policy._look(torch.from_numpy(observation))
        rows = scene.rows()
        rows.choices[0, 1, 0] += size
        legal = masks(1)
        for slot, blueprint in forbidden:
            legal["slot_blueprint"][0, slot, blueprint] = False
        wait = torch.zeros(1, len(HEADS), dtype=torch.int64)  # no other head counts
        decision = network.decide(rows, policy.legal(legal), wait)
        return float(decision.log_prob.detach())

    assert offered(0.0) != offered(1.0)
    assert offered(0.0, (1, 0)) == offered(1.0, (1, 0))
    everything = [(slot, blueprint) for slot in range(2) for blueprint in range(3)]
    assert offered(0.0, *everything) != offered(1.0)


@pytest.mark.finding("M8")
@pytest.mark.finding("H4")
@pytest.mark.parametrize("name", ["cpu", "meta"])
def test_an_agent_is_on_its_device_from_the_start(name: str) -> None:
    agent = PPOAgent(SPEC, LAYOUT, 4, PPOConfig(width=32), device=torch.device(name))
    assert agent.device == torch.device(name)
    statistics = (agent.observations, agent.rewards)
    tensors = [
        *agent.parameters,
        *(values for each in statistics for values in (each.mean, each.var)),
        agent.observations.continuous,
        *agent.state,
        agent.starts,
    ]
    assert {tensor.device for tensor in tensors} == {torch.device(name)}


@pytest.mark.finding("M21")
def test_raw_observations_are_kept_in_the_rollout_and_go_with_it() -> None:
    agent = PPOAgent(SPEC, LAYOUT, 4, PPOConfig(width=32))
    agent.begin()
    sizes = []
    for _ in range(3):
        for step in range(5):
            agent.act(observations(np.full((4, LAYOUT.size), float(step))), masks(4))
            nothing = np.zeros(4, dtype=np.bool_)
            agent.record(
                np.ones(4),
                np.zeros(4),
                np.full(4, step == 4),
                nothing,
                nothing,
                ~nothing,
            )
        sizes.append(len(agent.buffer))
        agent.update(np.zeros((4, LAYOUT.size), dtype=np.float32))
        assert len(agent.buffer) == 0
    assert sizes == [5, 5, 5]
    assert agent.observations.count == 3 * 5 * 4
