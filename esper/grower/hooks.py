"""Seeds on the outputs of a model's submodules, while a loop outside trains the model."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from esper.config import ConfigError
from esper.grower.passes import PassHook
from esper.grower.randomness import SeedDraws, kept_generators
from esper.hosts.between import Between
from esper.hosts.graft import FOUND, check_features
from esper.hosts.host import kept_modes
from esper.hosts.layout import Layout
from esper.hosts.outputs import features_of, with_features
from esper.hosts.places import place_of
from esper.hosts.seed_hook import (
    SeedHook,
    container_of,
    drop_container,
    free_name,
    register,
    unregister,
    with_share,
    without_copied_hooks,
    without_vacant_hooks,
)
from esper.hosts.site_path import SitePath
from esper.seeds.blend import Seed
from esper.seeds.features import Features
from esper.seeds.site import Site
from esper.seeds.topologies import SEQUENCES
from esper.training.delta import delta_of, straight_through
from esper.training.shadow import ShadowBuffers, copied_buffers

MAX_PROBE = 8
"""Samples of the features on which a new seed is tried."""


class GrowingSite:
    """The part of one site in the passes of one network: the model that grows, or an average of its weights.

    An average uses the seeds that are on, and leaves no trace.
    """

    def __init__(
        self,
        hooks: SiteHooks,
        model: nn.Module,
        name: str,
        hook: SeedHook,
    ) -> None:
        self.hooks = hooks
        self.model = model
        self.name = name
        self.hook = hook

    def grown(self, module: nn.Module, output: object) -> object:
        if self.model is self.hooks.model:
            if self.quiet:
                return output
            return self.hooks.grown(self.name, module, output, self.hook.source)
        h = features_of(output)
        site = self.hooks.sites.get(self.name)
        if site is None or site.seed is None or not isinstance(h, Tensor):
            return output
        at = Features(h, self.hook.source(h))
        return with_features(output, self.hooks.blended(site, at, watched=False))

    @property
    def quiet(self) -> bool:
        """Whether nothing is left to do here in this epoch unless a seed comes."""
        hooks = self.hooks
        site = hooks.sites.get(self.name)
        if site is None or site.seed is not None or self.name not in hooks.learned:
            return False
        return hooks.see is None and not hooks.frozen and not hooks.takes_probe(self.name)

    @property
    def reads(self) -> bool:
        site = self.hooks.sites.get(self.name)
        if self.model is not self.hooks.model:
            return site is not None and site.seed is not None
        return site is None or site.seed is not None or self.hooks.takes_probe(self.name)

    def present(self) -> tuple[Seed | None, float]:
        site = self.hooks.sites.get(self.name)
        if site is None or not site.on:
            return None, 0.0
        return site.seed, site.alpha

    def recipe(self) -> dict[str, Any]:
        site = self.hooks.sites.get(self.name)
        if site is None or site.planted is None:
            return {}
        place = site.place
        recipe = {
            "blueprint": site.planted.blueprint.name,
            "topology": place.topology,
            "order": list(place.order),
            "style": site.planted.style.name,
            "channels": place.channels,
        }
        if place.has_source:
            recipe["between"] = list(self.hooks.between[self.name].parts)
        return recipe


class SiteHooks:
    """Forward hooks that add seeds to the outputs of named submodules.

    While the model is in training mode, an incubating seed learns straight through, which changes no bit of the output,
    or in passes of its own. A blended seed adds alpha · d(h) in both modes. :meth:`trying` replaces the alphas for a
    validation.

    Args:
        model: the network; its parameters, buffers and state_dict stay as they are until :meth:`finish`.
        paths: where each slot lies, by its name, see :class:`SitePath`.
        topology: layout of the features, as in ``esper.graft``; None: it is found by ``esper.grower.looking.look``.
        straight_through: whether incubating seeds learn in every training pass; else in :meth:`shadowing` ones.
    """

    def __init__(
        self,
        model: nn.Module,
        paths: Mapping[str, str],
        topology: str | None,
        straight_through: bool = True,
    ) -> None:
        self.model = model
        self.declared = topology
        self.topology = topology or FOUND
        self.paths = {name: SitePath.parse(text) for name, text in paths.items()}
        self.straight_through = straight_through
        self.sites: dict[str, Site] = {}
        """Sites by slot name, in execution order; those that a forward pass has reached."""
        self.between: dict[str, Between] = {}
        """Layers between the source and the sink of each slot that has a source, as far as they are known."""
        self.probes: dict[str, Features] = {}
        """The last training pass at each site, of at most 8 samples, by slot name."""
        self.rows: dict[str, float] = {}
        """First dimension of the features at each site, in samples of the pass, by slot name."""
        self.own_buffers: dict[str, ShadowBuffers] = {}
        """The model's buffers of each seed that learns in passes of its own, by slot name."""
        self.draws: dict[str, SeedDraws] = {}
        """Random numbers of the seeds that draw any, by slot name."""
        self.learned: set[str] = set()
        """Slots whose site has run with gradients since :meth:`prepare_epoch`."""
        self.put_aside: Callable[[Tensor, Tensor], None] = lambda parameter, gradient: None
        """Receives the gradients of :meth:`incubate`."""
        self.frozen = False
        """Whether no parameter of the model has a gradient."""
        self._alphas: Mapping[str, float] | None = None
        self._shadowed: str | None = None
        self._checked: set[str] = set()
        self._fresh: set[str] = set()
        # Set by find_sites and by look while they run.
        self._finding = False
        self.see: Callable[[str, Tensor], None] | None = None
        self.growing: list[GrowingSite] = []
        """The sites of the model, and of the averages that follow it."""
        self.origin = uuid.uuid4().hex
        """Identifies this growth in copies of the model."""
        self.passes = PassHook(model)
        self.follow(model)
        self.prepare_epoch()

    def follow(self, network: nn.Module) -> None:
        """Adds the hooks to the model itself, or to an average of its weights, which then has the seeds, too."""
        without_copied_hooks(network, self.origin)
        without_vacant_hooks(network)
        container = container_of(network)
        for name, path in self.paths.items():
            hook = SeedHook(free_name(container, name))
            hook.origin = self.origin
            growing = GrowingSite(self, network, name, hook)
            hook.growth = growing
            container.growing[hook.name] = growing
            register(network, path, hook)
            self.growing.append(growing)

    def require_reached(self) -> None:
        """Raises ConfigError for a site that no forward pass has reached."""
        missing = [f"{name} ({path})" for name, path in self.paths.items() if name not in self.sites]
        if missing:
            raise ConfigError(
                f"no forward pass of the model has run the submodule of slot {', '.join(missing)}; train for an epoch "
                "before grower.step(), and call the model itself, not its parts"
            )

    def find_sites(self, evaluate: Callable[[nn.Module], object]) -> None:
        """Runs the untrained model once, with probes from this pass."""
        self._finding = True
        try:
            with kept_modes(self.model), kept_generators(self.devices), torch.no_grad():
                evaluate(self.model)
        finally:
            self._finding = False

    def place(
        self,
        name: str,
        channels: int,
        layout: Layout,
        between: Between | None,
    ) -> None:
        """Sets the place of a site: what a first pass shows of it, and then what a look at it finds."""
        place = place_of(self.model, name, channels, layout, between)
        self.sites.setdefault(name, Site(place)).place = place
        if between is not None:
            self.between[name] = between

    @contextmanager
    def seeing(self, see: Callable[[str, Tensor], None]) -> Iterator[None]:
        """Calls ``see`` with the features at each site in the passes of a block."""
        self.see = see
        try:
            yield
        finally:
            self.see = None

    @property
    def devices(self) -> list[torch.device]:
        """GPUs of the model."""
        return sorted({p.device for p in self.model.parameters() if p.device.type == "cuda"}, key=str)

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
                    self.put_aside(parameter, gradient)

    @contextmanager
    def trying(self, alphas: Mapping[str, float]) -> Iterator[None]:
        """Uses these alphas by slot instead of the sites' own; 0 leaves a seed out.

        A seed on trial that learns in passes of its own is tried with its own buffers.
        """
        self._alphas = alphas
        try:
            with ExitStack() as stack:
                for name, buffers in self.own_buffers.items():
                    if alphas.get(name):
                        stack.enter_context(buffers.in_place())
                yield
        finally:
            self._alphas = None

    @contextmanager
    def shadowing(self, name: str) -> Iterator[None]:
        """Blends the incubating seed of slot ``name`` in at its target alpha, and detaches the features before it.

        The pass uses and updates the seed's own buffers. Those of the model and of other seeds, and the random numbers
        of the process, are afterwards as they were.
        """
        others = []
        for site in self.sites.values():
            if site.name == name or site.seed is None:
                continue
            others.append(site.seed)
        self._shadowed = name
        self.passes.shadow = True
        try:
            with self.own_buffers[name].in_place(), copied_buffers(others), kept_generators(self.devices):
                yield
        finally:
            self._shadowed = None
            self.passes.shadow = False

    def prepare_epoch(self) -> None:
        """Takes new probes from the next training pass, and gives incubating seeds their own buffers.

        Only seeds that learn in passes of their own have them. They start with the model's present ones: statistics
        that were gathered without a seed would be wrong in its trials.
        """
        self._fresh.clear()
        self.learned.clear()
        self.frozen = not any(p.requires_grad for p in self.model.parameters())
        buffers = {}
        for name, site in self.sites.items():
            if site.incubating and not self.straight_through:
                buffers[name] = self.own_buffers.get(name) or ShadowBuffers(self.model)
        self.own_buffers = buffers

    @property
    def networks(self) -> list[nn.Module]:
        """The model and the averages that follow it."""
        return list({id(growing.model): growing.model for growing in self.growing}.values())

    def remove(self) -> None:
        """Removes the hooks; the model is as it was."""
        for growing in self.growing:
            unregister(growing.model, growing.hook)
            container_of(growing.model).growing.pop(growing.hook.name, None)
            drop_container(growing.model)
        self.growing.clear()
        self.passes.remove()

    def grown(
        self,
        name: str,
        module: nn.Module,
        output: object,
        source: Callable[[Tensor], Tensor],
    ) -> object:
        """Returns the output of the model's ``module``, with the seed of slot ``name`` as it takes part in the pass.

        ``source`` returns what the seed reads, given the features of the output.
        """
        h = features_of(output)
        first = self.passes.reach(name)
        if name not in self._checked:
            self._check(name, module, h)
        assert isinstance(h, Tensor)
        if self.see is not None:
            self.see(name, h)
        site = self.sites[name]
        training = self.model.training  # not the submodule's, which is in eval mode if it is frozen
        probing = self.takes_probe(name)
        reads = probing or site.seed is not None
        at = Features(h, source(h)) if reads else Features.at_sink(h)
        if probing:
            with torch.inference_mode(False):  # seeds are tried on it with gradients
                self.probes[name] = at.each(lambda values: values[:MAX_PROBE].detach().clone())
            self.rows[name] = len(h) / (self.passes.samples or len(h))
            self._fresh.add(name)
        if training and torch.is_grad_enabled():
            self.learned.add(name)
        out = self._in_pass(site, at, training, first)
        if out is h:
            return None
        return with_features(output, out)

    def takes_probe(self, name: str) -> bool:
        """Whether the present pass is the first one of the epoch whose features are kept for slot ``name``."""
        return (self.model.training or self._finding) and name not in self._fresh

    def blended(self, site: Site, at: Features, watched: bool = True) -> Tensor:
        """Returns the features at the sink with the seed of ``site`` at its alpha, or at that of a trial.

        ``watched``: whether a value that is not finite cuts the seed out.
        """
        alpha = site.alpha if site.on else 0.0
        if self._alphas is not None:
            alpha = self._alphas.get(site.name, 0.0)
        if not alpha:
            return at.h
        return with_share(at.h, delta_of(site, at, watched), alpha)

    def _in_pass(
        self,
        site: Site,
        at: Features,
        training: bool,
        first: bool,
    ) -> Tensor:
        """Returns the features at the sink, for the ``first`` or a later run of the site in the present pass."""
        learns = training and torch.is_grad_enabled()
        needs_graph = self.frozen and learns
        if site.seed is None:
            return _with_graph(at.h) if needs_graph else at.h
        if site.seed.training != training:
            site.seed.train(training)
        if self._alphas is None and site.name == self._shadowed:
            if first:  # later features depend on the seed
                at = at.each(Tensor.detach)
            return with_share(at.h, delta_of(site, at), site.target)
        if self._alphas is None and site.incubating:
            if self.straight_through and learns and self._shadowed is None:
                return straight_through(site, at, self.draws[site.name].own())
            return at.h
        out = self.blended(site, at)
        return _with_graph(out) if needs_graph else out

    def _check(self, name: str, module: nn.Module, h: object) -> None:
        """Adds the site of a submodule that runs for the first time, if its features can hold seeds."""
        batch = self.passes.samples
        # The number of samples is a guess from the model's inputs. Other features than [T, B, D] are not judged by it,
        # such as windows of images, or the nodes of a graph.
        time_first = self.declared in SEQUENCES and isinstance(h, Tensor) and h.dim() > 1 and h.shape[1] == batch
        path = self.paths[name]
        check_features(
            name,
            path,
            module,
            h,
            self.declared,
            batch if time_first else None,
        )
        assert isinstance(h, Tensor)
        site = self.sites.get(name)
        if site is None:
            layout = Layout(self.declared or "mlp")
            between = None if path.source is None else Between()
            self.place(name, layout.width_of(h), layout, between)
        else:
            before = site.place.channels
            channels = Layout(site.place.topology, site.place.order).width_of(h)
            if channels != before:
                raise ConfigError(f"slot {name}: {path.sink} returns {channels} channels, not {before} as before")
        self._checked.add(name)


class _Graph(torch.autograd.Function):
    """The identity, whose output needs a gradient."""

    @staticmethod
    def forward(_context: Any, h: Tensor, _anchor: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _with_graph(h: Tensor) -> Tensor:
    """Returns ``h`` as a part of a graph, so that a loss of a frozen network without seeds has a backward pass."""
    if h.requires_grad:
        return h
    anchor = torch.zeros((), device=h.device, requires_grad=True)
    return _Graph.apply(h, anchor)  # type: ignore[no-any-return, no-untyped-call]
