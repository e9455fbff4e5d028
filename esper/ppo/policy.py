"""The acting side of the agent: a network, its observation statistics, and a recurrent state for each env."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

PER_BLUEPRINT = {"blueprints": 0, "seed_kinds.weight": 1}
"""Weights with one row per blueprint, and the number of rows before the first blueprint's."""


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
            self.network = PolicyNetwork(spec, config.width, config.prior).to(self.device)
        self.observations = ObservationStatistics(self.device, config)
        self.episode = np.full(n_envs, -1)
        self.steps = np.zeros(n_envs, dtype=np.int64)
        self.state = self.network.memory.initial_state(n_envs, self.device)
        self.starts = torch.ones(n_envs, dtype=torch.bool, device=self.device)

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
    def step(self, raw: Tensor, legal: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Decision]:
        """Returns the normalised observation [E, size], its context [E, width] and the decision, and advances the
        recurrent state by one step."""
        seen = self.observations.normalize(raw)
        context, slots, after = self.network.encode(seen[None], self.state, self.starts[None])
        uniforms = None
        if not self.greedy:
            draws = counter_uniforms(self.run_seed, np.arange(self.n_envs), self.episode, self.steps, len(HEADS))
            uniforms = torch.from_numpy(draws).to(self.device)
        decision = self.network.decide(context[0], slots[0], legal, uniforms=uniforms)
        self.state, self.starts = after, torch.zeros_like(self.starts)
        self.steps += 1
        return seen, context[0], decision

    @torch.no_grad()
    def value_of(self, observation: Float32s) -> Tensor:
        """Returns V(s) [E] of the states after the last actions, given their ``observation`` [E, size].

        The recurrent state is read, not advanced.
        """
        seen = self.observations.normalize(torch.from_numpy(observation).to(self.device))
        context, _, _ = self.network.encode(seen[None], self.state, self.starts[None])
        return self.network.value(context[0])

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
        """Returns everything that acting depends on except the running episodes: the network, the names of the
        blueprints behind its embeddings, and the observation statistics."""
        return {
            "network": self.network.state_dict(),
            "blueprints": list(self.spec.blueprints),
            "observations": self.observations.state_dict(),
        }

    def load_policy_state(self, state: Mapping[str, Any]) -> None:
        """Loads a saved policy; on hosts like its own, the policy then acts identically, bit for bit.

        The number of slots may differ, and so may the blueprints; see :func:`for_blueprints`.

        Raises:
            ValueError: the saved policy knows none of the blueprints here; lists both.
            RuntimeError: the state belongs to a different network; names the differences.
        """
        self.network.load_state_dict(for_blueprints(state["network"], state["blueprints"], self.spec.blueprints))
        self.observations.load_state_dict(state["observations"])


def for_blueprints(weights: Mapping[str, Tensor], known: Sequence[str], wanted: Sequence[str]) -> dict[str, Tensor]:
    """Converts weights of a network that learned the blueprints ``known`` to hosts with the blueprints ``wanted``.

    A known name keeps its rows. An unknown one gets the mean of all known rows: its score is then the mean of the known
    scores, and it is planted if that beats the alternatives. Raises ValueError if there is no common name; lists both.
    """
    if not set(known) & set(wanted):
        raise ValueError(f"it knows the blueprints {', '.join(known)}; this host has {', '.join(wanted)}")
    moved = dict(weights)
    for name, before in PER_BLUEPRINT.items():
        rows = weights[name]
        learned = dict(zip(known, rows[before:], strict=True))
        typical = rows[before:].mean(dim=0)
        moved[name] = torch.cat((rows[:before], torch.stack([learned.get(wish, typical) for wish in wanted])))
    return moved
