"""The sites of a model that a user's loop trains: forward hooks on submodules add seeds to their outputs."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from esper.config import ConfigError
from esper.core.blend import Seed
from esper.core.place import SEQUENCES, Features
from esper.core.site import Site
from esper.grower.gradients import with_graph
from esper.grower.passes import PassHook, first_parameter_of, is_traced, require_untraced
from esper.hosts.between import Between, place_of
from esper.hosts.container import hold, release
from esper.hosts.example import cloned, is_transformed, kept_attributes, kept_state, outputs_for
from esper.hosts.inputs import features_of, with_features
from esper.hosts.layout import FOUND, Layout, check_features
from esper.hosts.seed_hook import (
    COPIES,
    SeedHook,
    free_name,
    register,
    rest,
    unregister,
    with_share,
    without_copied_hooks,
)
from esper.hosts.sources import SitePath
from esper.ops.torch_state import kept_generators
from esper.training.delta import delta_of, straight_through
from esper.training.rng import SeedDraws
from esper.training.shadow import ShadowBuffers, copied_buffers

MAX_PROBE = 8
"""Samples of the features on which a new seed is tried."""


class SiteHooks:
    """Adds seeds to the outputs of named submodules of a model, and of the averages that follow it.

    In training mode, an incubating seed learns straight through, which changes no bit of the output, or in passes of
    its own. A blended seed adds alpha · d(h) in both modes. :meth:`override_alphas` replaces the alphas for a
    validation. An average uses the seeds that are on.

    Args:
        model: the network; its parameters, buffers and state_dict stay as they are until growth ends.
        paths: where each slot lies, by its name, see :class:`SitePath`.
        topology: layout of the features, as in ``esper.graft``; None: ``esper.grower.env`` infers it.
        straight_through: whether incubating seeds learn in every training pass; else in :meth:`shadowing` passes.
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
        """Layers between the source and the sink of each slot that has a source, where known."""
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
        self.empty: set[str] = set()
        """Slots whose site has run without a sample since :meth:`prepare_epoch`."""
        self.stash: Callable[[Tensor, Tensor], None] = lambda parameter, gradient: None
        """Receives the gradients of :meth:`incubate`."""
        self.frozen = False
        """Whether no parameter of the model has a gradient."""
        self.finding = False
        """Whether the present passes look for sites, in any mode; set by :func:`esper.grower.env.probe_untrained`."""
        self._alphas: Mapping[str, float] | None = None
        self._shadowed: str | None = None
        self.said_loading = False
        self.checked: set[str] = set()
        self._fresh: set[str] = set()
        self.hooks: list[tuple[nn.Module, SeedHook]] = []
        """The hooks with their networks: the model, and the averages that follow it."""
        self._awake: set[str] = set()  # slots whose hooks are registered in the model
        self.origin = uuid.uuid4().hex
        """Identifies this growth in copies of the model."""
        COPIES[self.origin] = WeakSet()
        self.prepare_epoch()
        self.passes = PassHook(model)
        self.passes.before_pass = partial(_move_along, self)
        self.passes.after_pass = partial(_let_rest, self)
        for module in dict.fromkeys((model, *(model.get_submodule(path.sink) for path in self.paths.values()))):
            self.passes.watch_loading(module, partial(_warn_of_loading, self))
        self.form = _form_of(self)
        self.moved: Callable[[list[nn.Parameter]], None] = lambda parameters: None
        """Receives parameters of seeds that have followed the model to another dtype or device."""
        self.follow(model)

    def follow(self, network: nn.Module) -> None:
        """Adds the hooks to the model itself, or to an average of its weights, which then has the seeds, too."""
        without_copied_hooks(network, self.origin)
        for name, path in self.paths.items():
            hook = SeedHook(free_name(network, name))
            hook.origin = self.origin
            hook.growth = self
            hook.slot = name
            hook.in_average = network is not self.model
            register(network, path, hook)
            hold(network, path.sink, hook)
            self.hooks.append((network, hook))
        self._awake.update(self.paths)

    def place(
        self,
        name: str,
        channels: int,
        layout: Layout,
        between: Between | None,
    ) -> None:
        """Sets the place of a site: what a first pass shows of it, and then what inference finds."""
        place = place_of(self.model, name, channels, layout, between)
        self.sites.setdefault(name, Site(place)).place = place
        if between is not None:
            self.between[name] = between

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
                    self.stash(parameter, gradient)

    @contextmanager
    def override_alphas(self, alphas: Mapping[str, float]) -> Iterator[None]:
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
            own = self.own_buffers[name]
            with kept_attributes(self.model), own.in_place(), copied_buffers(others), kept_generators(self.devices):
                yield
        finally:
            self._shadowed = None
            self.passes.shadow = False

    def prepare_epoch(self) -> None:
        """Takes new probes from the next training pass, and gives incubating seeds their own buffers.

        Only seeds that learn in passes of their own have them. They start with the model's present ones: statistics
        that were gathered without a seed would be wrong in its trials.
        """
        _wake(self)
        self._first_parameter: tuple[nn.Module, str] | None = None  # layers may have been replaced
        self._fresh.clear()
        self.learned.clear()
        self.empty.clear()
        self.frozen = not any(p.requires_grad for p in self.model.parameters())
        buffers = {}
        for name, site in self.sites.items():
            if site.incubating and not self.straight_through:
                buffers[name] = self.own_buffers.get(name) or ShadowBuffers(self.model)
        self.own_buffers = buffers

    @property
    def networks(self) -> list[nn.Module]:
        """The model and the averages that follow it."""
        return list({id(network): network for network, _ in self.hooks}.values())

    def remove(self) -> None:
        """Removes the hooks; the model is as it was."""
        for network, hook in self.hooks:
            unregister(network, hook)
            release(network, hook)
        self.end()

    def end(self) -> None:
        """Leaves the hooks that are still registered to their networks."""
        self.hooks.clear()
        self.passes.remove()
        COPIES.pop(self.origin, None)

    def reads(self, hook: SeedHook) -> bool:
        site = self.sites.get(hook.slot)
        if hook.in_average:
            return site is not None and site.seed is not None
        return site is None or site.seed is not None or self._takes_probe(hook.slot)

    def present(self, slot: str) -> tuple[Seed | None, float, dict[str, Any]]:
        site = self.sites.get(slot)
        if site is None or site.planted is None:
            return None, 0.0, {}
        recipe = site.recipe
        if slot in self.between:
            recipe["between"] = list(self.between[slot].parts)
        if not site.on:
            return None, 0.0, recipe
        return site.seed, site.alpha, recipe

    def planted(self, slot: str) -> tuple[Seed | None, float]:
        site = self.sites.get(slot)
        if site is None:
            return None, 0.0
        return site.seed, site.alpha

    def grown(self, hook: SeedHook, module: nn.Module, output: object) -> object:
        """Returns the output of ``module``, with the seed of the slot as it takes part in the pass."""
        name = hook.slot
        h = features_of(output)
        transformed = is_transformed()
        if transformed:
            self.passes.transformed.add(name)
        if hook.in_average or transformed or is_traced():
            return _unwatched(self, hook, output, h)
        if isinstance(h, Tensor) and not h.is_nested and not h.numel():
            # An expert without tokens: nothing is to be seen of it, and nothing to be learned.
            if hook.frame is not None and self.reads(hook):
                hook.source(h)
            self.empty.add(name)
            return output
        if self._is_quiet(name):
            return output
        self.passes.at_site(self.model.training)
        first = self.passes.reach(name)
        if name not in self.checked:
            _check(self, name, module, h)
        assert isinstance(h, Tensor)
        site = self.sites[name]
        training = self.model.training  # not the submodule's, which is in eval mode if it is frozen
        probing = self._takes_probe(name)
        at = Features(h, hook.source(h)) if probing or site.seed is not None else Features.at_sink(h)
        if probing:
            with torch.inference_mode(False):  # seeds are tried on it with gradients
                self.probes[name] = at.each(lambda values: values[:MAX_PROBE].detach().clone())
            self.rows[name] = len(h) / (self.passes.samples or len(h))
            self._fresh.add(name)
        if training and torch.is_grad_enabled():
            self.learned.add(name)
        out = self._in_pass(site, at, training, first)
        return None if out is h else with_features(output, out)

    def _is_quiet(self, name: str) -> bool:
        """Whether nothing is left to do at a site in this epoch unless a seed comes."""
        site = self.sites.get(name)
        if site is None or site.seed is not None or name not in self.learned:
            return False
        return not self.frozen and not self._takes_probe(name)

    def _takes_probe(self, name: str) -> bool:
        """Whether the present pass is the first one of the epoch whose features are kept for slot ``name``."""
        return (self.model.training or self.finding) and name not in self._fresh

    def _blended(self, site: Site, at: Features, watched: bool = True) -> Tensor:
        """Returns the features at the sink with the seed of ``site`` at its alpha, or at that of a trial.

        ``watched``: whether a value that is not finite cuts the seed out.
        """
        alpha = site.alpha if site.on else 0.0
        if self._alphas is not None:
            alpha = self._alphas.get(site.name, 0.0)
        if not alpha:
            return at.h
        require_untraced(site.name)
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
            return with_graph(at.h) if needs_graph else at.h
        if site.seed.training != training:
            site.seed.train(training)
        if self._alphas is None and site.name == self._shadowed:
            if first:  # later features depend on the seed
                at = at.each(Tensor.detach)
            return with_share(at.h, delta_of(site, at), site.target)
        if self._alphas is None and site.incubating:
            if self.straight_through and learns and self._shadowed is None:
                require_untraced(site.name)
                return straight_through(site, at, self.draws[site.name].own())
            return at.h
        out = self._blended(site, at)
        return with_graph(out) if needs_graph else out


def _unwatched(hooks: SiteHooks, hook: SeedHook, output: object, h: object) -> object:
    """Returns the output ``output`` of a site, features ``h`` in it, in a pass in which seeds act and do not learn."""
    site = hooks.sites.get(hook.slot)
    if site is None or site.seed is None or not isinstance(h, Tensor):
        return output
    if site.incubating and hooks.model.training and not hook.in_average:
        require_untraced(hook.slot)
    at = Features(h, hook.source(h))
    return with_features(output, hooks._blended(site, at, watched=False))


def _wake(hooks: SiteHooks) -> None:
    """Registers all hooks in the model again."""
    for network, hook in hooks.hooks:
        if network is hooks.model and hook.slot not in hooks._awake:
            register(network, hooks.paths[hook.slot], hook)
    hooks._awake.update(hooks.paths)


def _let_rest(hooks: SiteHooks) -> None:
    """Removes the hooks from the model for the rest of the epoch where nothing is left to do, as they cost time."""
    if not hooks._awake or hooks._alphas is not None or hooks.passes.compiled:
        return
    quiet = {name for name in hooks._awake if hooks._is_quiet(name)}
    for network, hook in hooks.hooks if quiet else ():
        if network is hooks.model and hook.slot in quiet:
            rest(network, hooks.paths[hook.slot], hook)
    hooks._awake -= quiet


def trained_at(hooks: SiteHooks) -> set[str]:
    """Returns the slots whose site has run in training mode in the present epoch."""
    return hooks._fresh | hooks.learned


@contextmanager
def aside(hooks: SiteHooks) -> Iterator[None]:
    """Lets passes run that are no training: no seed learns in them, nothing is noted, and no state stays."""
    passes = hooks.passes
    noted = passes.last, passes.samples, hooks.learned, hooks._fresh
    hooks.learned = set()
    hooks._fresh = set(hooks.sites)
    hooks._shadowed = ""  # incubating seeds take no part
    passes.shadow = True
    seeds = [site.seed for site in hooks.sites.values() if site.seed is not None]
    try:
        with kept_state(hooks.model), copied_buffers(seeds), kept_generators(hooks.devices):
            yield
    finally:
        last, samples, learned, fresh = noted
        passes.last = last
        passes.samples = samples
        hooks.learned = learned
        hooks._fresh = fresh
        hooks._shadowed = None
        passes.shadow = False


def follow_layers(hooks: SiteHooks) -> None:
    """Gives the sites the widths that their layers have now, by a pass of the last batch in eval mode."""
    _wake(hooks)
    hooks._fresh.clear()
    hooks.finding = True
    try:
        outputs_of_last(hooks)
    finally:
        hooks.finding = False
    for name, site in hooks.sites.items():
        layout = Layout(site.place.topology, site.place.order)
        channels = layout.width_of(hooks.probes[name].h)
        if channels != site.place.channels:
            hooks.place(name, channels, layout, hooks.between.get(name))
    # Statistics of a seed that learns in passes of its own begin with those of the grown layers.
    for shadow in hooks.own_buffers.values():
        shadow.refill()


def outputs_of_last(hooks: SiteHooks) -> list[Tensor] | None:
    """Returns the tensors that the model returns for the last batch in eval mode; None without a batch.

    It runs without compiled code, which would hide its layers.
    """
    if hooks.passes.last is None:
        return None
    arguments, keywords = cloned(hooks.passes.last)
    with torch.compiler.set_stance("force_eager"):
        return outputs_for(hooks.model, arguments, keywords)


def _move_along(hooks: SiteHooks) -> None:
    """Moves seeds to the dtype and the device that the model has now."""
    form = _form_of(hooks)
    if form is None or form == hooks.form:
        return
    before, hooks.form = hooks.form, form
    for site in hooks.sites.values():
        if site.seed is None:
            continue
        moved = [p for p in site.seed.parameters() if (p.device, p.dtype) == before]
        site.seed.to(form[0], form[1] if moved else None)
        hooks.moved(moved)


def _warn_of_loading(hooks: SiteHooks) -> None:
    """Warns once of a state that was loaded into the model while seeds were on, which it does not hold.

    Before the first pass, a loop that resumes loads the state that belongs to the Grower's.
    """
    on = [name for name, site in hooks.sites.items() if site.on]
    if on and hooks.passes.last is not None and not hooks.said_loading:
        hooks.said_loading = True
        warnings.warn(
            f"a state was loaded into the model while it grows; the seeds in slot {', '.join(on)} are no part of "
            "it and stay as they are: to go back, make a new Grower and load all states of that epoch",
            stacklevel=6,
        )


def _check(hooks: SiteHooks, name: str, module: nn.Module, h: object) -> None:
    """Adds the site of a submodule that runs for the first time, if its features can hold seeds."""
    batch = hooks.passes.samples
    # The number of samples is a guess from the model's inputs. Other features than [T, B, D] are not judged by it,
    # such as windows of images, or the nodes of a graph.
    time_first = hooks.declared in SEQUENCES and isinstance(h, Tensor) and h.dim() > 1 and h.shape[1] == batch
    path = hooks.paths[name]
    check_features(name, path, module, h, hooks.declared, batch if time_first else None)
    assert isinstance(h, Tensor)
    site = hooks.sites.get(name)
    if site is None:
        layout = Layout(hooks.declared or "mlp")
        between = None if path.source is None else Between()
        hooks.place(name, layout.width_of(h), layout, between)
    else:
        before = site.place.channels
        channels = Layout(site.place.topology, site.place.order).width_of(h)
        if channels != before:
            raise ConfigError(f"slot {name}: {path.sink} returns {channels} channels, not {before} as before")
    hooks.checked.add(name)


def _form_of(hooks: SiteHooks) -> tuple[torch.device, torch.dtype] | None:
    """Returns the device and the dtype of the model's first floating-point parameter; None without one.

    It runs in each pass, and looks for the parameter once an epoch.
    """
    parameter = None
    if hooks._first_parameter is not None:
        module, name = hooks._first_parameter
        parameter = module._parameters.get(name)
    if parameter is None:
        hooks._first_parameter = first_parameter_of(hooks.model)
        if hooks._first_parameter is None:
            return None
        module, name = hooks._first_parameter
        parameter = module.get_parameter(name)
    return parameter.device, parameter.dtype
