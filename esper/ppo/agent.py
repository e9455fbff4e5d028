"""PPOAgent: a recurrent policy that is trained with PPO."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.config import PPOConfig
from esper.control.controller import Float32s, Masks, PerEnvController
from esper.ppo.buffer import RolloutBuffer, broken_steps, gae, legal_options
from esper.ppo.network import RELEVANCE
from esper.ppo.normalization import RewardNormalizer
from esper.ppo.policy import Policy
from esper.ppo.update import PolicyOutput, UpdateStats, imitation_loss, mean_over, ppo_loss, update_policy
from esper.spaces.action import HEADS, ActionSpec
from esper.spaces.observation import ObservationLayout


class PPOAgent(Policy):
    """Acts for E envs, stores the transitions, and learns from whole rounds.

    The normalisation statistics are frozen within a round and the normalised observations are stored, so replaying a
    round reproduces its log-probabilities.
    """

    def __init__(
        self,
        spec: ActionSpec,
        layout: ObservationLayout,
        n_envs: int,
        config: PPOConfig,
        run_seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(spec, layout, n_envs, config, run_seed, device)
        self.parameters = list(self.network.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, lr=config.learning_rate, eps=config.adam_eps)
        self.generator = torch.Generator().manual_seed(run_seed)
        self.rewards = RewardNormalizer(self.device, config)
        self.buffer = RolloutBuffer()
        self.teacher: PerEnvController | None = None
        """Acts in the agent's place, as long as it is set; the agent then learns to act likewise."""
        self.progress = 0.0
        """Fraction of training that is done, 0 to 1; it drives annealed values."""

    def begin(self, mask: NDArray[np.bool_] | None = None) -> None:
        super().begin(mask)
        if self.teacher is not None:
            self.teacher.begin(mask)

    def act(self, observation: Float32s, masks: Masks) -> NDArray[np.int64]:
        """Returns actions, int64 [E, 8], and stores the step with its observation; :meth:`record` completes it."""
        shown = None if self.teacher is None else torch.from_numpy(self.teacher.act(observation, masks)).to(self.device)
        before, starts, legal = self.state, self.starts, self.legal(masks)
        raw = torch.from_numpy(observation).to(self.device)
        seen, context, decision = self.step(raw, legal, shown)
        with torch.no_grad():
            value = self.network.value(context)
        inputs = {"raw": raw, "observation": seen, "start": starts}
        self.buffer.add(before, legal, **inputs, action=decision.action, log_prob=decision.log_prob, value=value)
        return decision.action.cpu().numpy()

    def load_from(self, other: PPOAgent) -> None:
        """Copies another agent's network weights and its observation and reward statistics."""
        self.load_policy_state(other.policy_state())
        self.rewards.load_state_dict(other.rewards.state_dict())

    def clone_policy(self, n_envs: int, run_seed: int, greedy: bool) -> Policy:
        """Returns a copy of the current policy for ``n_envs`` other envs; it does not learn."""
        policy = Policy(self.spec, self.layout, n_envs, self.config, run_seed, self.device, greedy)
        policy.load_policy_state(self.policy_state())
        return policy

    def record(
        self,
        rewards: NDArray[np.float64],
        unscaled: NDArray[np.float64],
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        idle: NDArray[np.bool_],
        final_observation: Float32s | None = None,
    ) -> None:
        """Completes the last stored step with its rewards and episode ends.

        ``unscaled`` [E] is the part of ``rewards`` [E] that is not normalised (the governor's). Idle envs made no step.
        ``final_observation`` [E, size] is required if an episode was truncated: its value is bootstrapped. Raises
        ValueError if it is missing.
        """
        values = torch.zeros(self.n_envs, device=self.device)
        if truncated.any():
            if final_observation is None:
                raise ValueError("final_observation is required if an episode was truncated")
            values = self.value_of(final_observation)
        self.buffer.amend(
            reward=torch.from_numpy(rewards - unscaled).float().to(self.device),
            unscaled=torch.from_numpy(unscaled).float().to(self.device),
            terminated=torch.from_numpy(terminated).to(self.device),
            truncated=torch.from_numpy(truncated).to(self.device),
            valid=torch.from_numpy(~idle).to(self.device),
            final_value=values,
        )

    def update(self, last_observation: Float32s) -> UpdateStats:
        """Updates the policy on the stored steps, then the observation statistics, and clears the buffer.

        ``last_observation`` [E, size] follows the last stored step; its value is bootstrapped. If a stored number is
        not finite, the round is dropped: weights and statistics stay as they were, and the result counts the steps.
        """
        last_value = self.value_of(last_observation)
        rollout, masks, state = self.buffer.stack()
        self.buffer.clear()
        rate = self.config.learning_rate * (1 - self.progress if self.config.anneal else 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        broken = int((broken_steps(rollout) & rollout["valid"]).sum())
        if broken:  # must reach neither the weights nor the running statistics
            return UpdateStats.skipped(broken, rate, self.entropy_coefficient)
        config, terminated, truncated = self.config, rollout["terminated"], rollout["truncated"]
        self.rewards.update(rollout["reward"], terminated | truncated, rollout["valid"])
        scaled = rollout["reward"] / self.rewards.scale + rollout["unscaled"]
        rewards = scaled.clamp(-config.reward_clip, config.reward_clip)
        ends = terminated, truncated, rollout["final_value"]
        advantage, target = gae(rewards, rollout["value"], last_value, *ends, config.gamma, config.gae_lambda)
        rollout |= {"advantage": advantage, "target": target, "free": masks["op"].sum(dim=-1) > 1}
        evaluate = partial(self._evaluate, rollout, masks, state)
        settings = config, self.entropy_coefficient, self.generator
        loss = ppo_loss if self.teacher is None else imitation_loss
        stats = update_policy(self.parameters, self.optimizer, evaluate, rollout, *settings, loss)
        stats.reward_scale = self.rewards.scale
        with torch.no_grad():
            entropies = evaluate(torch.arange(self.n_envs)).entropies
        relevant = RELEVANCE.to(self.device)[rollout["action"][..., 0]]
        mattered = (rollout["valid"] & rollout["free"])[..., None] & relevant
        choices = mattered & (legal_options(rollout["action"], masks) > 1)
        log_head_entropies(stats, entropies, mattered, choices)
        self.observations.update(rollout["raw"][rollout["valid"]])
        return stats

    @property
    def entropy_coefficient(self) -> float:
        """Weight of the entropy bonus, from ``entropy_start`` to ``entropy_end`` by the progress of training."""
        return self.config.entropy_start + (self.config.entropy_end - self.config.entropy_start) * self.progress

    def _evaluate(
        self, rollout: Mapping[str, Tensor], masks: Mapping[str, Tensor], state: tuple[Tensor, Tensor], envs: Tensor
    ) -> PolicyOutput:
        """Evaluates the current network on the whole sequences of ``envs``."""
        initial = (state[0][envs], state[1][envs])
        scene, _ = self.network.encode(rollout["observation"][:, envs], initial, rollout["start"][:, envs])
        legal = {name: mask[:, envs].flatten(0, 1) for name, mask in masks.items()}
        action = rollout["action"][:, envs].flatten(0, 1)
        decision = self.network.decide(scene.rows(), legal, action=action)
        shape = scene.context.shape[:2]
        log_prob, entropies = decision.log_prob.view(shape), decision.entropies.view(*shape, len(HEADS))
        return PolicyOutput(self.network.value(scene.context), log_prob, entropies)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of acting and learning between two steps, as tensors and plain numbers.

        Steps stored for the next update are not included: see ``buffer``.
        """
        return {
            **self.policy_state(),
            "optimizer": self.optimizer.state_dict(),
            "rewards": self.rewards.state_dict(),
            "generator": self.generator.get_state(),
            "memory": self.memory_state(),
            "progress": self.progress,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`."""
        self.load_policy_state(state)
        # Adam keeps the given tensors and updates them in place.
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.rewards.load_state_dict(state["rewards"])
        self.generator.set_state(state["generator"])
        self.load_memory_state(state["memory"])
        self.progress = float(state["progress"])


def log_head_entropies(stats: UpdateStats, entropies: Tensor, mattered: Tensor, choices: Tensor) -> None:
    """Sets the mean entropy of each head: over the steps in which it ``mattered``, and over those with ``choices``.

    All tensors are [T, E, heads]. The results are transferred once.
    """
    means = [mean_over(entropies[..., i], where[..., i]) for where in (mattered, choices) for i in range(len(HEADS))]
    counts = choices.flatten(0, -2).sum(dim=0)
    numbers = torch.cat((torch.stack(means).double(), counts.double())).tolist()
    every, chosen, counted = (numbers[start : start + len(HEADS)] for start in range(0, len(numbers), len(HEADS)))
    stats.head_entropies = dict(zip(HEADS, every, strict=True))
    stats.head_choices = {head: int(count) for head, count in zip(HEADS, counted, strict=True) if count}
    stats.choice_entropies = {head: mean for head, mean, count in zip(HEADS, chosen, counted, strict=True) if count}
