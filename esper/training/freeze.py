"""Parts of a host that do not learn."""

from __future__ import annotations

from torch import nn

from esper.config.task import Freeze
from esper.hosts.grown import GrownHost
from esper.hosts.host import Host, layers_of


def freeze(host: Host, which: Freeze) -> tuple[nn.Module, ...]:
    """Stops layers of ``host`` from learning; returns those that stay in eval mode.

    ``body`` are all layers but the head, which is the last layer with parameters. Statistics of frozen norms stay, too,
    so that the host without seeds computes the same ever after. New seeds that are built in learn.
    """
    if which == "nothing":
        return ()
    new = set[nn.Module]()
    if isinstance(host, GrownHost) and host.new_seeds:
        new.update(host.seeds.modules())
    layers = [layer for layer in layers_of(host).values() if layer not in new]
    head = layers[-1:] if which == "body" else []
    for layer in layers:
        for parameter in layer.parameters(recurse=False):
            parameter.requires_grad_(layer in head)

    learning = new.union(head)
    old = [module for module in host.modules() if module not in new]
    # A module that contains one that learns stays in train mode.
    return tuple(module for module in old if learning.isdisjoint(module.modules()))
