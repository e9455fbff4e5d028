"""The masked categorical distribution of an action head, and the random numbers that actions are sampled with."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MASKED_LOGIT = -1e4
"""Logit of an illegal choice: low enough for probability 0 in float32, but finite, so that gradients stay finite."""


class MaskedCategorical:
    """A categorical distribution over n options for each of N rows.

    ``logits`` are [N, n]. ``legal`` bool [N, n] marks the options that may be chosen, at least one in every row.
    """

    def __init__(self, logits: Tensor, legal: Tensor) -> None:
        self.legal = legal
        masked = torch.where(legal, logits.float(), MASKED_LOGIT)
        self.log_probs = torch.log_softmax(masked, dim=-1)  # [N, n]

    def sample(self, uniforms: Tensor) -> Tensor:
        """Samples choices [N] by inverting the CDF at ``uniforms`` [N] in [0, 1); every choice is legal."""
        probs = self.log_probs.exp().masked_fill(~self.legal, 0.0)
        cumulative = probs.cumsum(dim=-1)
        total = cumulative[:, -1:]  # 1, but for rounding
        chosen = (cumulative <= uniforms[:, None] * total).sum(dim=-1)
        # Rounding may also lead past the last legal option.
        illegal_after = self.legal.flip(-1).int().argmax(dim=-1)
        last_legal = self.legal.shape[-1] - 1 - illegal_after
        return torch.minimum(chosen, last_legal)

    def mode(self) -> Tensor:
        """Returns the most likely choice [N]."""
        return self.log_probs.argmax(dim=-1)

    def log_prob(self, choice: Tensor) -> Tensor:
        """log p(choice) [N]."""
        return self.log_probs.gather(-1, choice[:, None])[:, 0]

    def normalized_entropy(self) -> Tensor:
        """−Σ p ln p / ln(number of legal options) [N], in [0, 1]; 0 if only one choice is legal."""
        plogp = self.log_probs.exp() * self.log_probs
        plogp = torch.where(self.legal, plogp, 0.0)
        options = self.legal.sum(dim=-1)
        highest = options.clamp(min=2).float().log()
        return -plogp.sum(dim=-1) / highest * (options > 1)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): an input bit flips half of the output bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def counter_uniforms(
    run_seed: int,
    env: NDArray[np.int64],
    episode: NDArray[np.int64],
    step: NDArray[np.int64],
    draws: int,
) -> NDArray[np.float64]:
    """Returns uniform numbers in [0, 1), float64 [E, draws], keyed by (run seed, env, episode, step, draw).

    An env's numbers depend only on its own counters; ``env``, ``episode`` and ``step`` are int64 [E].
    """
    with np.errstate(over="ignore"):
        one = np.uint64(1)
        golden = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / the golden ratio
        key = _mix(np.full(len(env), run_seed, dtype=np.uint64) + golden)
        for counter in (env, episode, step):
            key = _mix(key * golden + counter.astype(np.uint64) + one)
        draw = np.arange(draws, dtype=np.uint64)
        values = _mix(key[:, None] + golden * (draw + one))
    # The upper 53 bits, as many as float64 holds.
    return (values >> np.uint64(11)).astype(np.float64) * 2.0**-53
