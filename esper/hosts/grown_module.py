"""A grown model as an ordinary module: each grown submodule with its seed, and no hooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from esper.hosts.outputs import features_of, with_features
from esper.seeds.blend import Seed


class GrownModule(nn.Module):
    """A submodule whose output h becomes h + alpha · d(h); of a tuple, the first tensor.

    Args:
        module: the submodule, with its own arguments.
        seed: maps features h to d(h), of the same shape.
        alpha: share of the seed, 0 to 1.
    """

    def __init__(self, module: nn.Module, seed: Seed, alpha: float) -> None:
        super().__init__()
        self.module, self.seed, self.alpha = module, seed, alpha

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.module(*args, **kwargs)
        h = features_of(output)
        assert isinstance(h, Tensor)
        return with_features(output, torch.add(h, self.seed(h).to(h.dtype), alpha=self.alpha))


def grown_in_place(model: nn.Module, seeds: Mapping[str, tuple[Seed, float]]) -> None:
    """Replaces each submodule of ``model`` at these paths by a :class:`GrownModule` with this seed and alpha."""
    for path, (seed, alpha) in sorted(seeds.items(), reverse=True):  # inner ones first
        old = model.get_submodule(path)
        new = GrownModule(old, seed.requires_grad_(True), alpha)
        new.training = old.training
        seed.train(old.training)
        model.set_submodule(path, new)
