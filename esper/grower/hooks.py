"""Seeds on the outputs of a model's submodules, while a loop outside trains the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from esper.config import ConfigError
from esper.hosts.graft import LAYOUTS, check_features
from esper.hosts.host import kept_modes
from esper.hosts.outputs import features_of, with_features
from esper.seeds.site import Site, SlotSite
from esper.training.shadow import ShadowBuffers, copied_buffers
from esper.training.step import delta_of, straight_through

MAX_PROBE = 8
"""Samples of the features on which a new seed is tried."""


class SiteHooks:
    """Forward hooks that add seeds to the outputs of named submodules.

    While the model is in training mode, an incubating seed learns straight through, which changes no bit of the output,
    or in passes of its own. A blended seed adds alpha · d(h) in both modes. :meth:`trying` replaces the alphas for a
    validation.

    Args:
        model: the network; nothing is added to it but hooks.
        paths: path of a submodule by slot name.
        topology: layout of the features, as in ``esper.graft``.
        straight_through: whether incubating seeds learn in every training pass; else in :meth:`shadowing` ones.
    """

    def __init__(
        self, model: nn.Module, paths: Mapping[str, str], topology: str, straight_through: bool = True
    ) -> None:
        self.model, self.paths, self.topology = model, dict(paths), topology
        self.straight_through = straight_through
        self.sites: dict[str, Site] = {}
        """Sites by slot name, in execution order; those that a forward pass has reached."""
        self.probes: dict[str, Tensor] = {}
        """Features [B ≤ 8, ...] of the last training pass, by slot name."""
        self.own_buffers: dict[str, ShadowBuffers] = {}
        """The model's buffers of each seed that learns in passes of its own, by slot name."""
        self._alphas: Mapping[str, float] | None = None
        self._shadowed: str | None = None
        self._reached: set[str] = set()  # by the present forward pass
        self._checked: set[str] = set()
        self._fresh: set[str] = set()
        self._handles = [
            model.get_submodule(path).register_forward_hook(
                lambda _module, _inputs, output, name=name: self._pass(name, output)
            )
            for name, path in self.paths.items()
        ]
        self.before_first_pass: Callable[[], None] | None = None
        """Done once, before the next forward pass of the model."""
        self._finding = False  # in find_sites
        self._inside = False  # a forward pass of the whole model is running
        self._handles.append(model.register_forward_pre_hook(lambda *_: self._enter()))
        self._handles.append(model.register_forward_hook(lambda *_: self._leave(), always_call=True))

    def require_reached(self) -> None:
        """Raises ConfigError for a site that no forward pass has reached."""
        if missing := [f"{name} ({path})" for name, path in self.paths.items() if name not in self.sites]:
            raise ConfigError(
                f"no forward pass of the model has run the submodule of slot {', '.join(missing)}; train for an epoch "
                "before grower.step(), and call the model itself, not its parts"
            )

    def find_sites(self, evaluate: Callable[[nn.Module], object]) -> None:
        """Runs the untrained model once, with probes from this pass."""
        self._finding = True
        try:
            with kept_modes(self.model), torch.no_grad():
                evaluate(self.model)
        finally:
            self._finding = False

    def place(self, name: str, channels: int) -> None:
        """Adds a site that no forward pass has reached yet."""
        self.sites.setdefault(name, Site(SlotSite(name, channels)))

    def incubate(self, loss: Callable[[], Tensor]) -> None:
        """Adds to the gradients of each incubating seed those of ``loss``, computed with the seed at its target."""
        for site in self.sites.values():
            if site.seed is None or not site.incubating:
                continue
            parameters = [p for p in site.seed.parameters() if p.requires_grad]
            with self.shadowing(site.name):
                gradients = torch.autograd.grad(loss(), parameters, allow_unused=True)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    @contextmanager
    def trying(self, alphas: Mapping[str, float]) -> Iterator[None]:
        """Uses these alphas by slot instead of the sites' own; 0 leaves a seed out.

        A seed on trial that learns in passes of its own is tried with its own buffers.
        """
        self._alphas = alphas
        try:
            with ExitStack() as stack:
                for name, own in self.own_buffers.items():
                    if alphas.get(name):
                        stack.enter_context(own.in_place())
                yield
        finally:
            self._alphas = None

    @contextmanager
    def shadowing(self, name: str) -> Iterator[None]:
        """Blends the incubating seed of slot ``name`` in at its target alpha, and detaches the features before it.

        The pass uses and updates the seed's own buffers. Those of the model and of other seeds, and torch's random
        numbers, are afterwards as they were.
        """
        others = [site.seed for site in self.sites.values() if site.seed is not None and site.name != name]
        devices = {p.device for p in self.model.parameters() if p.device.type == "cuda"}
        self._shadowed = name
        try:
            with (
                self.own_buffers[name].in_place(),
                copied_buffers(others),
                torch.random.fork_rng(devices=list(devices)),
            ):
                yield
        finally:
            self._shadowed = None

    def prepare_epoch(self) -> None:
        """Takes new probes from the next training pass, and gives incubating seeds their own buffers.

        Only seeds that learn in passes of their own have them. They start with the model's present ones: statistics
        that were gathered without a seed would be wrong in its trials.
        """
        self._fresh.clear()
        incubating = () if self.straight_through else [name for name, site in self.sites.items() if site.incubating]
        self.own_buffers = {name: self.own_buffers.get(name) or ShadowBuffers(self.model) for name in incubating}

    def remove(self) -> None:
        """Removes the hooks; the model is as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self) -> None:
        if self.before_first_pass is not None:
            self.before_first_pass()
            self.before_first_pass = None
        self._reached.clear()
        self._inside = True

    def _leave(self) -> None:
        self._inside = False

    def _pass(self, name: str, output: object) -> object:
        h = features_of(output)
        if name not in self._reached:
            self._reached.add(name)
        elif self._inside:  # activation checkpointing runs it again outside, in the backward pass
            raise ConfigError(f"slot {name}: {self.paths[name]} runs more than once in a forward pass")
        if name not in self._checked:
            self._check(name, h)
        assert isinstance(h, Tensor)
        training = self.model.training  # not the submodule's, which is in eval mode if it is frozen
        if (training or self._finding) and name not in self._fresh:
            with torch.inference_mode(False):  # seeds are tried on it with gradients
                self.probes[name] = h[:MAX_PROBE].detach().clone()
            self._fresh.add(name)
        out = self._grown(self.sites[name], h, training)
        return None if out is h else with_features(output, out)

    def _grown(self, site: Site, h: Tensor, training: bool) -> Tensor:
        if site.seed is None:
            return h
        if site.seed.training != training:
            site.seed.train(training)
        if self._alphas is not None:
            alpha = self._alphas.get(site.name, 0.0)
        elif site.name == self._shadowed:
            h = h.detach()
            return torch.add(h, delta_of(site, h), alpha=site.target)
        elif site.incubating:
            learns = self.straight_through and self._shadowed is None and training and torch.is_grad_enabled()
            return straight_through(site, h, nullcontext()) if learns else h
        else:
            alpha = site.alpha if site.on else 0.0
        return torch.add(h, delta_of(site, h), alpha=alpha) if alpha else h

    def _check(self, name: str, h: object) -> None:
        """Adds the site of a submodule that runs for the first time, if its features can hold seeds."""
        check_features(name, self.paths[name], h, self.topology)
        assert isinstance(h, Tensor)
        channels = LAYOUTS[self.topology][1]
        known = self.sites.get(name)
        if known is not None and known.place.channels != h.shape[channels]:
            found = h.shape[channels]
            raise ConfigError(
                f"slot {name}: {self.paths[name]} returns {found} channels, not {known.place.channels} as before"
            )
        self.place(name, h.shape[channels])
        self._checked.add(name)
