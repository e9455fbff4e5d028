"""The acting side of the agent: a network, its observation statistics, and a recurrent state for each env."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.config import PPOConfig
from esper.control.controller import Float32s, Masks
from esper.ppo.distribution import counter_uniforms
from esper.ppo.network import Decision, PolicyNetwork
from esper.ppo.normalization import ObservationStatistics
from esper.spaces.action import HEADS, ActionSpec
from esper.spaces.observation import ObservationLayout


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
        self.config, self.spec, self.layout, self.n_envs, self.run_seed = config, spec, layout, n_envs, run_seed
        self.device, self.greedy = device or torch.device("cpu"), greedy
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(run_seed)
            self.network = PolicyNetwork(spec, config).to(self.device)
        self.observations = ObservationStatistics(len(spec.slots), self.device, config)
        self.episode = np.full(n_envs, -1)
        self.steps = np.zeros(n_envs, dtype=np.int64)
        self.state = self.network.memory.initial_state(n_envs, self.device)
        self.starts = torch.ones(n_envs, dtype=torch.bool, device=self.device)
        self.log_prob: Float32s | None = None
        """Joint log-probabilities [E] of the last actions; None before the first."""

    def begin(self, mask: NDArray[np.bool_] | None = None) -> None:
        """Starts new episodes in the envs of ``mask`` bool [E]; None for all."""
        started = np.ones(self.n_envs, dtype=np.bool_) if mask is None else mask
        self.episode[started] += 1
        self.steps[started] = 0
        self.starts |= torch.from_numpy(started).to(self.device)

    def act(self, observation: Float32s, masks: Masks) -> NDArray[np.int64]:
        _, _, decision = self.step(torch.from_numpy(observation).to(self.device), self.legal(masks))
        return decision.action.cpu().numpy()

    def legal(self, masks: Masks) -> dict[str, Tensor]:
        """Copies the masks to tensors on the policy's device."""
        return {name: torch.from_numpy(mask).to(self.device) for name, mask in masks.items()}

    @torch.no_grad()
    def step(
        self, raw: Tensor, legal: Mapping[str, Tensor], action: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Decision]:
        """Returns the normalised observation [E, size], its context [E, width] and the decision, and advances the
        recurrent state by one step. ``action`` int64 [E, 8] is the decision, if another controller made it."""
        seen = self.observations.normalize(raw)
        scene, after = self.network.encode(seen[None], self.state, self.starts[None])
        scene = scene.rows()
        uniforms = None
        if not self.greedy:
            draws = counter_uniforms(self.run_seed, np.arange(self.n_envs), self.episode, self.steps, len(HEADS))
            uniforms = torch.from_numpy(draws).to(self.device)
        decision = self.network.decide(scene, legal, action, uniforms)
        self.state, self.starts = after, torch.zeros_like(self.starts)
        self.steps += 1
        self.log_prob = decision.log_prob.cpu().numpy()
        return seen, scene.context, decision

    @torch.no_grad()
    def value_of(self, observation: Float32s) -> Tensor:
        """Returns V(s) [E] of the states after the last actions, given their ``observation`` [E, size].

        The recurrent state is read, not advanced.
        """
        seen = self.observations.normalize(torch.from_numpy(observation).to(self.device))
        scene, _ = self.network.encode(seen[None], self.state, self.starts[None])
        return self.network.value(scene.context[0])

    def memory_state(self) -> dict[str, Any]:
        return {
            "episode": torch.tensor(self.episode),
            "steps": torch.tensor(self.steps),
            "state": tuple(part.cpu().clone() for part in self.state),
            "starts": self.starts.cpu().clone(),
        }

    def load_memory_state(self, state: Mapping[str, Any]) -> None:
        self.episode, self.steps = state["episode"].numpy().copy(), state["steps"].numpy().copy()
        hidden, cell = (part.to(self.device, copy=True) for part in state["state"])
        self.state, self.starts = (hidden, cell), state["starts"].to(self.device, copy=True)

    def policy_state(self) -> dict[str, Any]:
        """Returns everything that acting depends on except the running episodes: the network and the observation
        statistics."""
        return {"network": self.network.state_dict(), "observations": self.observations.state_dict()}

    def load_policy_state(self, state: Mapping[str, Any]) -> None:
        """Loads a saved policy; on hosts like its own, the policy then acts identically, bit for bit.

        The slots and the blueprints may be others. Raises RuntimeError if the state belongs to a different network;
        names the differences.
        """
        self.network.load_state_dict(state["network"])
        self.observations.load_state_dict(state["observations"])
