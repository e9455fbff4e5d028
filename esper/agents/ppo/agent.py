"""PPOAgent: a recurrent policy that is trained with PPO."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.agents.controller import Masks, PerEnvController
from esper.agents.ppo.buffer import RolloutBuffer, broken_steps, gae, legal_options, others_mean
from esper.agents.ppo.network import RELEVANCE, State
from esper.agents.ppo.normalization import RewardNormalizer
from esper.agents.ppo.policy import Policy
from esper.agents.ppo.update import PolicyOutput, UpdateStats, imitation_loss, mean_over, ppo_loss, update_policy
from esper.config import PPOConfig
from esper.core.action import HEADS, ActionSpec
from esper.core.arrays import Float32s
from esper.core.observation import ObservationLayout
from esper.ops.optimizer import Adam
from esper.ops.torch_state import training_state


class PPOAgent(Policy):
    """Acts for E envs, stores the transitions, and learns from whole rounds.

    The normalisation statistics are frozen within a round and the normalised observations are stored, so replaying a
    round reproduces its log-probabilities.
    """

    @training_state()
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
        self.optimizer = Adam(
            self.parameters,
            lr=config.learning_rate,
            eps=config.adam_eps,
            fused=True,
        )
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
        shown = None
        if self.teacher is not None:
            shown = self.tensor(self.teacher.act(observation, masks))
        before = self.state
        starts = self.starts
        legal = self.legal(masks)
        raw = self.tensor(observation)
        seen, context, decision = self.step(raw, legal, shown)
        with torch.no_grad():
            value = self.network.value(context)
        self.buffer.add(
            before,
            legal,
            raw=raw,
            observation=seen,
            start=starts,
            action=decision.action,
            log_prob=decision.log_prob,
            value=value,
        )
        return decision.action.cpu().numpy()

    def clone_policy(
        self,
        n_envs: int,
        run_seed: int,
    ) -> Policy:
        """Returns a copy of the current policy for ``n_envs`` other envs, which is greedy and does not learn."""
        policy = Policy(
            self.spec,
            self.layout,
            n_envs,
            self.config,
            run_seed,
            self.device,
            greedy=True,
        )
        policy.load_policy_state(self.policy_state())
        return policy

    def record(
        self,
        rewards: NDArray[np.float64],
        unscaled: NDArray[np.float64],
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        idle: NDArray[np.bool_],
        trained: NDArray[np.bool_],
        final_observation: Float32s | None = None,
    ) -> None:
        """Completes the last stored step with its rewards and episode ends.

        ``unscaled`` [E] is the part of ``rewards`` [E] that is not normalised (the governor's). Idle envs made no step;
        those of ``trained`` [E] trained an epoch. ``final_observation`` [E, size] is required if an episode was
        truncated: its value is bootstrapped. Raises ValueError if it is missing.
        """
        values = torch.zeros(self.n_envs, device=self.device)
        if truncated.any():
            if final_observation is None:
                raise ValueError("final_observation is required if an episode was truncated")
            values = self.value_of(final_observation)
        self.buffer.amend(
            reward=torch.from_numpy(rewards - unscaled).float().to(self.device),
            unscaled=torch.from_numpy(unscaled).float().to(self.device),
            terminated=self.tensor(terminated),
            truncated=self.tensor(truncated),
            valid=self.tensor(~idle),
            trained=self.tensor(trained),
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
        rate = self._set_learning_rate()
        broken = int((broken_steps(rollout) & rollout["valid"]).sum())
        if broken:  # must reach neither the weights nor the running statistics
            return UpdateStats.skipped(broken, rate, self.entropy_coefficient)

        self._estimate_advantages(rollout, last_value)
        rollout["free"] = masks["op"].sum(dim=-1) > 1
        evaluate = partial(self._evaluate, rollout, masks, state)
        stats = update_policy(
            self.parameters,
            self.optimizer,
            evaluate,
            rollout,
            self.config,
            self.entropy_coefficient,
            self.generator,
            ppo_loss if self.teacher is None else imitation_loss,
        )
        stats.reward_scale = self.rewards.scale
        if self.teacher is None:
            self._log_entropies(stats, rollout, masks, evaluate)
        # Last, because the policy was updated on observations that the old statistics have normalised.
        self.observations.update(rollout["raw"][rollout["valid"]])
        return stats

    def _set_learning_rate(self) -> float:
        """Sets the learning rate for the progress of training, and returns it."""
        rate = self.config.learning_rate
        if self.config.anneal:
            rate *= 1 - self.progress
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _estimate_advantages(self, rollout: dict[str, Tensor], last_value: Tensor) -> None:
        """Adds ``advantage`` and ``target`` to ``rollout``; its rewards are scaled by statistics that include them."""
        config = self.config
        reward = rollout["reward"]
        terminated = rollout["terminated"]
        truncated = rollout["truncated"]
        self.rewards.update(reward, terminated | truncated, rollout["valid"], rollout["trained"])
        # What is unscaled is in the unit of scaled rewards.
        scaled = reward / self.rewards.scale + rollout["unscaled"]
        scaled = scaled - rollout["terminated"] * others_mean(scaled * rollout["valid"], config.group or 1)
        rollout["advantage"], rollout["target"] = gae(
            scaled.clamp(-config.reward_clip, config.reward_clip),
            rollout["value"],
            last_value,
            terminated,
            truncated,
            rollout["final_value"],
            rollout["trained"],
            config.gamma,
            config.gae_lambda,
        )

    def _log_entropies(
        self,
        stats: UpdateStats,
        rollout: Mapping[str, Tensor],
        masks: Mapping[str, Tensor],
        evaluate: Callable[[Tensor], PolicyOutput],
    ) -> None:
        """Sets the mean entropy of each head of the updated policy: over the steps in which the head mattered, and over
        those in which it also had a choice.

        Numbers are transferred once.
        """
        with torch.no_grad():
            entropies = evaluate(torch.arange(self.n_envs)).entropies  # [T, E, heads]
        action = rollout["action"]
        acting = rollout["valid"] & rollout["free"]
        mattered = acting[..., None] & RELEVANCE.to(self.device)[action[..., 0]]
        choices = mattered & (legal_options(action, masks) > 1)

        means: list[Tensor] = []
        for marked in (mattered, choices):
            means += map(mean_over, entropies.unbind(-1), marked.unbind(-1))
        counts = choices.flatten(0, -2).sum(dim=0)
        numbers = torch.cat((torch.stack(means).double(), counts.double())).tolist()
        heads = len(HEADS)
        for place, head in enumerate(HEADS):
            stats.head_entropies[head] = numbers[place]
            count = int(numbers[2 * heads + place])
            if count:
                stats.head_choices[head] = count
                stats.choice_entropies[head] = numbers[heads + place]

    @property
    def entropy_coefficient(self) -> float:
        """Weight of the entropy bonus, from ``entropy_start`` to ``entropy_end`` by the progress of training."""
        start = self.config.entropy_start
        return start + (self.config.entropy_end - start) * self.progress

    def _evaluate(
        self,
        rollout: Mapping[str, Tensor],
        masks: Mapping[str, Tensor],
        state: State,
        envs: Tensor,
    ) -> PolicyOutput:
        """Evaluates the current network on the whole sequences of ``envs``."""
        hidden, cell = state
        scene, _ = self.network.encode(
            rollout["observation"][:, envs],
            (hidden[envs], cell[envs]),
            rollout["start"][:, envs],
        )
        # The heads decide row by row: [T, E, ...] becomes [T · E, ...], and back.
        legal = {name: mask[:, envs].flatten(0, 1) for name, mask in masks.items()}
        action = rollout["action"][:, envs].flatten(0, 1)
        decision = self.network.decide(scene.rows(), legal, action)
        shape = scene.context.shape[:2]
        return PolicyOutput(
            self.network.value(scene.context),
            decision.log_prob.view(shape),
            decision.entropies.view(*shape, len(HEADS)),
        )

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
