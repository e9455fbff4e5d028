"""What one round leaves for the update: everything as it was when it was used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from esper.ppo.recurrent import State

MASK_NAMES = ("op", "op_slot", "slot_blueprint", "style", "tempo", "alpha_target", "alpha_speed", "alpha_curve")


class RolloutBuffer:
    """Steps of E envs in order of time; tensors [T, E, ...] after :meth:`stack`.

    Observations are kept raw, for the running statistics, and normalised, as they were acted on.
    """

    def __init__(self) -> None:
        self._steps: list[dict[str, Tensor]] = []
        self._masks: list[Mapping[str, Tensor]] = []
        self.initial_state: State | None = None

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, state: State, masks: Mapping[str, Tensor], **step: Tensor) -> None:
        """One step of all envs; ``state`` is the recurrent state before it, of which the first is kept."""
        if self.initial_state is None:
            self.initial_state = (state[0].clone(), state[1].clone())
        self._masks.append({name: masks[name] for name in MASK_NAMES})
        self._steps.append(step)

    def amend(self, **values: Tensor) -> None:
        """What is known of the last step only after it was taken: rewards, ends."""
        self._steps[-1].update(values)

    def stack(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The steps and the masks, by name, each [T, E, ...]."""
        steps = {name: torch.stack([step[name] for step in self._steps]) for name in self._steps[0]}
        masks = {name: torch.stack([mask[name] for mask in self._masks]) for name in MASK_NAMES}
        return steps, masks

    def state_dict(self) -> dict[str, Any]:
        """What an update that learns from several rounds has so far."""
        return {"steps": self._steps, "masks": self._masks, "initial": self.initial_state}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        def here(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: tensor.to(device) for name, tensor in tensors.items()}

        self._steps, self._masks = [here(step) for step in state["steps"]], [here(mask) for mask in state["masks"]]
        initial = state["initial"]
        self.initial_state = None if initial is None else (initial[0].to(device), initial[1].to(device))

    def clear(self) -> None:
        self._steps.clear()
        self._masks.clear()
        self.initial_state = None


def broken_steps(rollout: Mapping[str, Tensor]) -> Tensor:
    """Bool [T, E]: steps with a number in them that is not finite, be it seen, felt, valued or earned."""
    finite = rollout["raw"].isfinite().all(dim=-1)
    for name in ("observation", "log_prob", "value", "reward", "unscaled"):
        values = rollout[name].isfinite()
        finite = finite & (values.all(dim=-1) if values.ndim > finite.ndim else values)
    return ~finite


def legal_options(action: Tensor, masks: Mapping[str, Tensor]) -> Tensor:
    """Int64 [T, E, 8]: how many choices each head had, given those that were made before it in ``action`` [T, E, 8]."""
    op, slot = action[..., 0], action[..., 1]

    def chosen(mask: Tensor, place: Tensor) -> Tensor:
        """Row ``place`` [T, E] of mask [T, E, N, M]."""
        return mask.gather(2, place[..., None, None].expand(*place.shape, 1, mask.shape[-1]))[..., 0, :]

    rows = (masks["op"], chosen(masks["op_slot"], op), chosen(masks["slot_blueprint"], slot))
    return torch.stack([row.sum(dim=-1) for row in (*rows, *(masks[name] for name in MASK_NAMES[3:]))], dim=-1)


def env_minibatches(n_envs: int, n_minibatches: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Indices of envs, shuffled, in ``n_minibatches`` parts of nearly equal size; whole sequences stay together."""
    yield from torch.randperm(n_envs, generator=generator).tensor_split(min(n_minibatches, n_envs))
