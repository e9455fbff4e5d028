"""A frozen host with another network that learns beside it: a member of an ensemble, or a pupil."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection
from typing import Self

import torch
from torch import Tensor

from esper.hosts.host import Host, SiteHook
from esper.hosts.inputs import Inputs
from esper.seeds.features import Features

DISTILLED_SHARE = 0.5
"""Share of the teacher's outputs in the loss of a pupil."""
TEMPERATURE = 2.0


class BesideHost(Host):
    """A network that learns, as a host with its sites, and a frozen ``host``, in eval mode.

    Args:
        host: the frozen one.
        learner: the network that learns.
    """

    def __init__(self, host: Host, learner: Host) -> None:
        super().__init__()
        self.host = host.requires_grad_(False)
        self.learner = learner
        self._take_sites()

    def _take_sites(self) -> None:
        self.sites = self.learner.sites
        self.topology = self.learner.topology
        self.in_place = self.learner.in_place

    def probe(self, x: Inputs) -> None:
        self.host.probe(x)
        self.learner.probe(x)
        self._take_sites()

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of the learner."""
        super().train(mode)
        self.host.eval()
        return self

    def forward_with_hook(
        self,
        x: Inputs,
        hook: SiteHook,
        vacant: Collection[int] = (),
    ) -> Tensor:
        return self.joined(self.learner.forward_with_hook(x, hook, vacant), x)

    def forward_from(
        self,
        x: Inputs,
        site: int,
        at: Features,
        hook: SiteHook,
        vacant: Collection[int] = (),
    ) -> Tensor:
        return self.joined(self.learner.forward_from(x, site, at, hook, vacant), x)

    @abstractmethod
    def joined(self, logits: Tensor, x: Inputs) -> Tensor:
        """Returns the outputs for the learner's ``logits`` [..., classes] of inputs ``x``."""

    def old_logits(self, x: Inputs) -> Tensor:
        """Returns the outputs of the frozen host."""
        with torch.no_grad():
            return self.host.forward_with_hook(x, lambda _site, at: at.h)


class Ensemble(BesideHost):
    """The logarithm of the mean probability of both; the learner trains on its own outputs."""

    def joined(self, logits: Tensor, x: Inputs) -> Tensor:
        if self.training:
            return logits
        both = torch.stack([logits.log_softmax(-1), self.old_logits(x).log_softmax(-1)])
        return both.logsumexp(0) - math.log(2)


class Distilled(BesideHost):
    """The learner, which learns from the classes and from the outputs of the frozen host.

    Hinton, Vinyals and Dean 2015, "Distilling the Knowledge in a Neural Network": the loss is (1 − λ) · CE + λ · T² ·
    KL(teacher ‖ pupil) of softmaxes at temperature T.
    """

    @property
    def parameter_count(self) -> int:
        """Number of parameters of the learner, which is what remains."""
        return self.learner.parameter_count

    def joined(self, logits: Tensor, x: Inputs) -> Tensor:
        if not self.training or not logits.requires_grad:
            return logits
        teacher = (self.old_logits(x) / TEMPERATURE).softmax(-1)
        pupil = (logits.detach() / TEMPERATURE).softmax(-1)
        outputs = logits.numel() // logits.shape[-1]
        # ∂/∂logits of T² · KL is T · (pupil − teacher), of the mean over all outputs.
        from_teacher = TEMPERATURE * (pupil - teacher) / outputs
        share = DISTILLED_SHARE
        logits.register_hook(lambda gradient: (1 - share) * gradient + share * from_teacher)  # type: ignore[no-untyped-call]
        return logits
