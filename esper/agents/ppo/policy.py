"""The acting side of the agent: a network, its observation statistics, and a recurrent state for each env."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.agents.controller import Masks
from esper.agents.ppo.network import Decision, PolicyNetwork, Scene, State, counter_uniforms
from esper.agents.ppo.normalization import ObservationStatistics
from esper.config import PPOConfig
from esper.core.action import HEADS, ActionSpec
from esper.core.arrays import Float32s
from esper.core.observation import ObservationLayout


class Policy:
    """A :class:`Controller` for E envs that samples actions, or takes the most likely ones if ``greedy``.

    Random numbers are keyed by (run seed, env, episode, step). Observations are normalised by running statistics, which
    acting never changes.
    """

    def __init__(
        self,
        spec: ActionSpec,
        layout: ObservationLayout,
        n_envs: int,
        config: PPOConfig,
        run_seed: int = 0,
        device: torch.device | None = None,
        greedy: bool = False,
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.n_envs = n_envs
        self.config = config
        self.run_seed = run_seed
        self.device = device or torch.device("cpu")
        self.greedy = greedy
        # The initial weights depend on the seed only, and leave the caller's random numbers as they are.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(run_seed)
            self.network = PolicyNetwork(spec, config).to(self.device)
        self.observations = ObservationStatistics(len(spec.slots), self.device, config)
        self.episode = np.full(n_envs, -1)
        """Number of the episode that each env plays, [E]."""
        self.steps = np.zeros(n_envs, dtype=np.int64)
        """Steps of these episodes so far, [E]."""
        self.state = self.network.memory.initial_state(n_envs, self.device)
        self.starts = torch.ones(n_envs, dtype=torch.bool, device=self.device)
        self.log_prob: Float32s | None = None
        """Joint log-probabilities [E] of the last actions; None before the first."""

    def begin(self, mask: NDArray[np.bool_] | None = None) -> None:
        """Starts new episodes in the envs of ``mask`` bool [E]; None for all."""
        if mask is None:
            mask = np.ones(self.n_envs, dtype=np.bool_)
        self.episode[mask] += 1
        self.steps[mask] = 0
        self.starts |= self.tensor(mask)

    def act(self, observation: Float32s, masks: Masks) -> NDArray[np.int64]:
        _, _, decision = self.step(self.tensor(observation), self.legal(masks))
        return decision.action.cpu().numpy()

    def tensor(self, array: NDArray[Any]) -> Tensor:
        """Returns an array as a tensor on the policy's device; on the CPU, they share their memory."""
        return torch.from_numpy(array).to(self.device)

    def legal(self, masks: Masks) -> dict[str, Tensor]:
        """Returns the masks as tensors on the policy's device."""
        return {name: self.tensor(mask) for name, mask in masks.items()}

    @torch.no_grad()
    def step(
        self,
        raw: Tensor,
        legal: Mapping[str, Tensor],
        action: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Decision]:
        """Returns the normalised observation [E, size], its context [E, width] and the decision, and advances the
        recurrent state by one step.

        ``action`` int64 [E, 8] is the decision, if another controller made it; its log-probability is then left at 0.
        """
        seen = self.observations.normalize(raw)
        scene, after = self._look(seen)
        scene = scene.rows()
        if action is None:
            decision = self.network.decide(scene, legal, uniforms=self._uniforms())
        else:
            nothing = torch.zeros(action.shape, device=self.device)
            decision = Decision(action, nothing[:, 0], nothing)
        self.state = after
        self.starts = torch.zeros_like(self.starts)
        self.steps += 1
        self.log_prob = decision.log_prob.cpu().numpy()
        return seen, scene.context, decision

    def _uniforms(self) -> Tensor | None:
        """Returns the random numbers [E, 8] of a decision; None for a greedy policy."""
        if self.greedy:
            return None
        draws = counter_uniforms(
            self.run_seed,
            np.arange(self.n_envs),
            self.episode,
            self.steps,
            draws=len(HEADS),
        )
        return self.tensor(draws)

    @torch.no_grad()
    def value_of(self, observation: Float32s) -> Tensor:
        """Returns V(s) [E] of the states after the last actions, given their ``observation`` [E, size].

        The recurrent state is read, not advanced.
        """
        seen = self.observations.normalize(self.tensor(observation))
        scene, _ = self._look(seen)
        return self.network.value(scene.context[0])

    def _look(self, seen: Tensor) -> tuple[Scene, State]:
        """Returns the scenes [1, E, ...] of one step, and the recurrent state after it."""
        return self.network.encode(
            seen[None],
            self.state,
            self.starts[None],
        )

    def memory_state(self) -> dict[str, Any]:
        hidden, cell = self.state
        return {
            "episode": torch.tensor(self.episode),
            "steps": torch.tensor(self.steps),
            "state": (hidden.cpu().clone(), cell.cpu().clone()),
            "starts": self.starts.cpu().clone(),
        }

    def load_memory_state(self, state: Mapping[str, Any]) -> None:
        self.episode = state["episode"].numpy().copy()
        self.steps = state["steps"].numpy().copy()
        hidden, cell = state["state"]
        self.state = (
            hidden.to(self.device, copy=True),
            cell.to(self.device, copy=True),
        )
        self.starts = state["starts"].to(self.device, copy=True)

    def policy_state(self) -> dict[str, Any]:
        """Returns everything that acting depends on except the running episodes: the network and the observation
        statistics."""
        return {
            "network": self.network.state_dict(),
            "observations": self.observations.state_dict(),
        }

    def load_policy_state(self, state: Mapping[str, Any]) -> None:
        """Loads a saved policy; on hosts like its own, the policy then acts identically, bit for bit.

        The slots and the blueprints may be others. Raises RuntimeError if the state belongs to a different network;
        names the differences.
        """
        self.network.load_state_dict(state["network"])
        self.observations.load_state_dict(state["observations"])
