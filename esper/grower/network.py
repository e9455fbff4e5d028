"""A grown model as an ordinary module: each grown submodule with its seed, and no hooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from esper.seeds.site import Site


class GrownModule(nn.Module):
    """A submodule whose output h becomes h + alpha · d(h); of a tuple, the first tensor.

    Args:
        module: the submodule, with its own arguments.
        seed: maps features h to d(h), of the same shape.
        alpha: share of the seed, 0 to 1.
    """

    def __init__(self, module: nn.Module, seed: nn.Module, alpha: float) -> None:
        super().__init__()
        self.module, self.seed, self.alpha = module, seed, alpha

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.module(*args, **kwargs)
        if isinstance(output, tuple):
            return (self._add(output[0]), *output[1:])
        return self._add(output)

    def _add(self, h: Tensor) -> Tensor:
        return torch.add(h, self.seed(h).to(h.dtype), alpha=self.alpha)


def grown_in_place(model: nn.Module, sites: Mapping[str, Site]) -> None:
    """Replaces each submodule of ``model`` at these paths by a :class:`GrownModule` with the site's seed."""
    for path, site in sorted(sites.items(), reverse=True):  # inner ones first
        assert site.seed is not None
        old = model.get_submodule(path)
        new = GrownModule(old, site.seed.requires_grad_(True), site.alpha)
        new.training = old.training
        site.seed.train(old.training)
        model.set_submodule(path, new)
