"""PPOAgent: a recurrent policy that acts on observations and masks, and learns from what came of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.config import PPOConfig
from esper.ppo.advantage import gae
from esper.ppo.buffer import RolloutBuffer
from esper.ppo.network import PolicyNetwork
from esper.ppo.normalization import RewardNormalizer, RunningMeanStd
from esper.ppo.sampling import counter_uniforms
from esper.ppo.update import Evaluated, UpdateStats, update
from esper.spaces.action import HEADS, ActionSpec
from esper.spaces.observation import Kind, ObservationLayout

REWARD_CLIP = 10.0


class PPOAgent:
    """Acts for E envs and learns from whole rounds.

    Observations are normalised by statistics that are frozen within a round; what is stored is what was acted on, so
    that replaying a round reproduces its log-probabilities.
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
        self.config, self.spec, self.layout, self.n_envs, self.run_seed = config, spec, layout, n_envs, run_seed
        self.device = device or torch.device("cpu")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(run_seed)
            self.network = PolicyNetwork(spec, config.width).to(self.device)
        self.parameters = list(self.network.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, lr=config.learning_rate, eps=config.adam_eps)
        self.generator = torch.Generator().manual_seed(run_seed)
        self.observations = RunningMeanStd(layout.size, self.device)
        self.rewards = RewardNormalizer(config.gamma, self.device)
        continuous = [entry.kind is Kind.CONTINUOUS for entry in layout.entries]
        self.continuous = torch.tensor(continuous, device=self.device)
        self.buffer = RolloutBuffer()
        self.progress = 0.0
        """How much of training is done, 0 to 1: what annealed values follow."""
        self.episode = np.full(n_envs, -1)
        self.steps = np.zeros(n_envs, dtype=np.int64)
        self.state = self.network.memory.initial_state(n_envs, self.device)
        self.starts = torch.ones(n_envs, dtype=torch.bool, device=self.device)

    def begin(self, mask: NDArray[np.bool_] | None = None) -> None:
        """New episodes start in the envs of ``mask`` [E]; None for all."""
        started = np.ones(self.n_envs, dtype=np.bool_) if mask is None else mask
        self.episode[started] += 1
        self.steps[started] = 0
        self.starts |= torch.from_numpy(started).to(self.device)

    @torch.no_grad()
    def act(
        self,
        observation: NDArray[np.float32],
        masks: Mapping[str, NDArray[np.bool_]],
        deterministic: bool = False,
        store: bool = False,
    ) -> NDArray[np.int64]:
        """Actions int64 [E, 8]; ``store`` keeps the step for :meth:`learn`."""
        raw = torch.from_numpy(observation).to(self.device)
        legal = {name: torch.from_numpy(mask).to(self.device) for name, mask in masks.items()}
        seen = self.normalize(raw)
        before = self.state
        context, slots, after = self.network.encode(seen[None], before, self.starts[None])
        draws = None
        if not deterministic:
            draws = torch.from_numpy(
                counter_uniforms(self.run_seed, np.arange(self.n_envs), self.episode, self.steps, len(HEADS))
            ).to(self.device)
        decision = self.network.decide(context[0], slots[0], legal, uniforms=draws)
        if store:
            self.buffer.add(
                before,
                legal,
                raw=raw,
                observation=seen,
                start=self.starts,
                action=decision.action,
                log_prob=decision.log_prob,
                value=self.network.value(context[0]),
            )
        self.state, self.starts = after, torch.zeros_like(self.starts)
        self.steps += 1
        return decision.action.cpu().numpy()

    @torch.no_grad()
    def value_of(self, observation: NDArray[np.float32]) -> Tensor:
        """V(s) [E] of the states that the last actions led to, with the recurrent state after those actions."""
        seen = self.normalize(torch.from_numpy(observation).to(self.device))
        context, _, _ = self.network.encode(seen[None], self.state, self.starts[None])
        return self.network.value(context[0])

    def record(
        self,
        rewards: NDArray[np.float64],
        unscaled: NDArray[np.float64],
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        idle: NDArray[np.bool_],
        final_observation: NDArray[np.float32] | None = None,
    ) -> None:
        """What came of the last stored step.

        ``unscaled`` [E] is the part of ``rewards`` [E] that is not normalised (the governor's). Idle envs made no step.
        ``final_observation`` is needed where an episode was truncated: its value is bootstrapped.
        """
        device = self.device
        values = torch.zeros(self.n_envs, device=device)
        if truncated.any():
            if final_observation is None:
                raise ValueError("a truncated episode needs the observation that it stopped in")
            values = self.value_of(final_observation)
        self.buffer.amend(
            reward=torch.from_numpy(rewards - unscaled).float().to(device),
            unscaled=torch.from_numpy(unscaled).float().to(device),
            terminated=torch.from_numpy(terminated).to(device),
            truncated=torch.from_numpy(truncated).to(device),
            valid=torch.from_numpy(~idle).to(device),
            final_value=values,
        )

    def learn(self, last_observation: NDArray[np.float32]) -> UpdateStats:
        """Update on the stored steps, which end in ``last_observation``; then move the running statistics."""
        last_value = self.value_of(last_observation)
        rollout, masks = self.buffer.stack()
        state = self.buffer.initial_state
        assert state is not None
        ends = rollout["terminated"] | rollout["truncated"]
        self.rewards.update(rollout["reward"], ends, rollout["valid"])
        scaled = (rollout["reward"] / self.rewards.scale + rollout["unscaled"]).clamp(-REWARD_CLIP, REWARD_CLIP)
        advantage, target = gae(
            scaled,
            rollout["value"],
            last_value,
            rollout["terminated"],
            rollout["truncated"],
            rollout["final_value"],
            self.config.gamma,
            self.config.gae_lambda,
        )
        rollout |= {"advantage": advantage, "target": target, "free": masks["op"].sum(dim=-1) > 1}
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * ((1 - self.progress) if self.config.anneal else 1.0)

        def evaluate(envs: Tensor) -> Evaluated:
            return self._evaluate(rollout, masks, state, envs)

        numbers = {name: rollout[name] for name in ("log_prob", "value", "advantage", "target", "valid", "free")}
        stats = update(
            self.parameters, self.optimizer, evaluate, numbers, self.config, self.entropy_coefficient, self.generator
        )
        with torch.no_grad():
            entropies = self._evaluate(rollout, masks, state, torch.arange(self.n_envs)).entropies
        stats.head_entropies = {head: float(entropies[..., i].mean()) for i, head in enumerate(HEADS)}
        self.observations.update(rollout["raw"][rollout["valid"]])
        self.buffer.clear()
        return stats

    def replayed_log_probs(self) -> tuple[Tensor, Tensor]:
        """Stored and replayed joint log-probabilities [T, E] of the round in the buffer; they agree to rounding."""
        rollout, masks = self.buffer.stack()
        assert self.buffer.initial_state is not None
        with torch.no_grad():
            now = self._evaluate(rollout, masks, self.buffer.initial_state, torch.arange(self.n_envs))
        return rollout["log_prob"], now.log_prob

    @property
    def entropy_coefficient(self) -> float:
        """From ``entropy_start`` to ``entropy_end`` with the progress of training."""
        return self.config.entropy_start + (self.config.entropy_end - self.config.entropy_start) * self.progress

    def normalize(self, raw: Tensor) -> Tensor:
        """Continuous entries by the running statistics; flags and indices as they are."""
        return torch.where(self.continuous, self.observations.normalize(raw), raw)

    def _evaluate(
        self, rollout: Mapping[str, Tensor], masks: Mapping[str, Tensor], state: tuple[Tensor, Tensor], envs: Tensor
    ) -> Evaluated:
        """The network as it is now on the whole sequences of ``envs``."""
        initial = (state[0][envs], state[1][envs])
        context, slots, _ = self.network.encode(rollout["observation"][:, envs], initial, rollout["start"][:, envs])
        legal = {name: mask[:, envs].flatten(0, 1) for name, mask in masks.items()}
        action = rollout["action"][:, envs].flatten(0, 1)
        decision = self.network.decide(context.flatten(0, 1), slots.flatten(0, 1), legal, action=action)
        shape = context.shape[:2]
        return Evaluated(
            self.network.value(context), decision.log_prob.view(shape), decision.entropies.view(*shape, len(HEADS))
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything that acting and learning depend on, as tensors and plain numbers."""
        return {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "observations": self.observations.state_dict(),
            "rewards": self.rewards.state_dict(),
            "generator": self.generator.get_state(),
            "episode": torch.from_numpy(self.episode),
            "progress": self.progress,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        # Adam keeps the very tensors it is given, and changes them in place.
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.observations.load_state_dict(state["observations"])
        self.rewards.load_state_dict(state["rewards"])
        self.generator.set_state(state["generator"])
        self.episode = state["episode"].numpy().copy()
        self.progress = float(state["progress"])
