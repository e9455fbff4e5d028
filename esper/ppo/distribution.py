"""The masked categorical distribution behind every action head."""

from __future__ import annotations

import torch
from torch import Tensor

MASKED_LOGIT = -1e4
"""Logit of an illegal choice: low enough for probability 0 in float32, but finite, so that gradients stay finite."""


class MaskedCategorical:
    """A categorical distribution over n options for each of N rows.

    ``logits`` are [N, n]. ``legal`` bool [N, n] marks the options that may be chosen, at least one in every row.
    """

    def __init__(self, logits: Tensor, legal: Tensor) -> None:
        self.legal = legal
        self.log_probs = torch.log_softmax(torch.where(legal, logits.float(), MASKED_LOGIT), dim=-1)  # [N, n]

    def sample(self, uniforms: Tensor) -> Tensor:
        """Samples choices [N] by inverting the CDF at ``uniforms`` [N] in [0, 1); every choice is legal."""
        cumulative = self.log_probs.exp().masked_fill(~self.legal, 0.0).cumsum(dim=-1)
        chosen = (cumulative <= uniforms[:, None] * cumulative[:, -1:]).sum(dim=-1)
        last_legal = self.legal.shape[-1] - 1 - self.legal.flip(-1).int().argmax(dim=-1)
        return torch.minimum(chosen, last_legal)

    def mode(self) -> Tensor:
        """Returns the most likely choice [N]."""
        return self.log_probs.argmax(dim=-1)

    def log_prob(self, choice: Tensor) -> Tensor:
        """log p(choice) [N]."""
        return self.log_probs.gather(-1, choice[:, None])[:, 0]

    def normalized_entropy(self) -> Tensor:
        """−Σ p ln p / ln(number of legal options) [N], in [0, 1]; 0 if only one choice is legal."""
        plogp = torch.where(self.legal, self.log_probs.exp() * self.log_probs, 0.0)
        options = self.legal.sum(dim=-1)
        return -plogp.sum(dim=-1) / options.clamp(min=2).float().log() * (options > 1)
