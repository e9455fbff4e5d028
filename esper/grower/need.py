"""Need of the vacant slots of a model in a user's loop, by the losses of two batches."""

from __future__ import annotations

from esper.grower.sites import SiteHooks, aside
from esper.hosts.need import Loss, needs_at


def measure_need(hooks: SiteHooks, first: Loss, second: Loss) -> dict[str, float]:
    """Returns the need of each vacant slot, in units of the loss; buffers and random numbers stay as they were.

    The losses and errors are those of :func:`needs_at`.
    """
    vacant = {name: site.place for name, site in hooks.sites.items() if site.seed is None}
    with aside(hooks):
        return needs_at(vacant, first, second)
