"""An LSTM over sequences that contain episode starts."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

State = tuple[Tensor, Tensor]
"""Hidden and cell state, each [E, H]."""


class SequenceLSTM(nn.Module):
    """A one-layer LSTM whose state is reset at the start of an episode.

    Sequences are split at the steps in which any env starts an episode, and each piece runs through the fused kernel.
    Without such steps it is as fast as a plain LSTM.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.lstm = nn.LSTM(size, size)

    def forward(self, x: Tensor, state: State, starts: Tensor) -> tuple[Tensor, State]:
        """Maps x [T, E, H] to outputs [T, E, H] and the state after the last step.

        ``state`` is the state before the first step; ``starts`` bool [T, E] marks the first steps of episodes.
        """
        cuts = [0, *(int(t) for t in starts.any(dim=1).nonzero().flatten() if t > 0), len(x)]
        outputs = []
        for begin, end in pairwise(cuts):
            fresh = starts[begin][:, None]
            state = (torch.where(fresh, 0.0, state[0]), torch.where(fresh, 0.0, state[1]))
            out, (h, c) = self.lstm(x[begin:end], (state[0][None].contiguous(), state[1][None].contiguous()))
            outputs.append(out)
            state = (h[0], c[0])
        return torch.cat(outputs), state

    def initial_state(self, envs: int, device: torch.device) -> State:
        zeros = torch.zeros(envs, self.size, device=device)
        return zeros, zeros.clone()
