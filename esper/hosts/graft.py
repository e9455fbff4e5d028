"""Slots in any ``nn.Module``: forward hooks read and change the outputs of named submodules."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn

from esper.config import ConfigError
from esper.core.place import Features, Place
from esper.hosts.between import Between, Part, Trace, place_of
from esper.hosts.find import Sites, named_sites
from esper.hosts.host import Host, SiteHook, kept_modes, row_major
from esper.hosts.inputs import Inputs, as_inputs, call, features_of, logits_of, with_features
from esper.hosts.layout import FOUND, Layout, check_features, check_sites
from esper.hosts.sources import SitePath, SourceFrame, hook_site


class GraftedHost(Host):
    """Any network with slots on the outputs of some of its submodules; made by :func:`graft`.

    Nothing is added to the network: ``host.model`` and its state_dict stay as they are. :meth:`forward_from` reruns the
    layers before the site, without gradients, because a module cannot be entered half-way.
    """

    in_place = True  # a layer such as ReLU(inplace=True) may follow a site

    def __init__(
        self,
        model: nn.Module,
        paths: Mapping[str, str],
        topology: str | None,
    ) -> None:
        super().__init__()
        self.model = model
        self.paths = dict(paths)
        """Where each slot lies, by its name: the path of a submodule, or two, see :class:`SitePath`."""
        self._paths = {name: SitePath.parse(text) for name, text in paths.items()}
        self.between: dict[str, tuple[Part, ...]] = {}
        """Layers between the source and the sink of the slots that have a source, by slot name, where known."""
        self.topology = topology or FOUND
        self._frozen: list[nn.Module] = []
        if model.training:
            self._frozen = [module for module in model.modules() if not module.training]
        self._use_slots(set(paths))

    def forward_with_hook(
        self,
        x: Inputs,
        hook: SiteHook,
        vacant: Collection[int] = (),
    ) -> Tensor:
        with self._hooked(hook, vacant):
            return self._run(x)

    def forward_from(
        self,
        x: Inputs,
        site: int,
        at: Features,
        hook: SiteHook,
        vacant: Collection[int] = (),
    ) -> Tensor:
        learning = torch.is_grad_enabled()

        def enter(reached: int, features: Features) -> Tensor:
            if reached != site:
                return hook(reached, features)
            torch.set_grad_enabled(learning)
            return at.h

        # Seeds before the site act again, because other layers than the site's may pass their effect on.
        with torch.set_grad_enabled(False), self._hooked(enter, {*vacant} - {site}):
            return self._run(x)

    def _run(self, x: Inputs) -> Tensor:
        return logits_of(call(self.model, x.clone()))  # type: ignore[no-any-return]  # it may overwrite its inputs

    def probe(self, x: Inputs) -> None:
        wanted = {site.name: self._paths[site.name] for site in self.sites}
        with kept_modes(self), torch.no_grad():
            self.eval()
            trace = Trace(
                self.model,
                lambda: self.forward_with_hook(x, lambda _site, at: at.h),
                list(wanted.values()),
            )
            missing = [f"{name} ({path})" for name, path in wanted.items() if path.sink not in trace.runs]
            if missing:
                raise ConfigError(f"the forward pass never runs the submodule of slot {', '.join(missing)}")
            for name, path in wanted.items():
                run = trace.runs[path.sink]
                if run.count > 1:
                    raise ConfigError(f"slot {name}: {path.sink} runs more than once in a forward pass")
                module = self.model.get_submodule(path.sink)
                check_features(name, path, module, run.output, self.declared, len(x))
            layouts = trace.layouts(wanted, self.declared, len(x))
        order = list(trace.runs)
        channels = {}
        between = {}
        for name in sorted(wanted, key=lambda name: order.index(wanted[name].sink)):
            path = wanted[name]
            channels[name] = trace.width(path.sink, layouts[name])
            if path.source is not None:
                between[name] = trace.between(path)
        self._place(channels, between, layouts)

    @property
    def declared(self) -> str | None:
        """The topology of all sites; None: each has its own."""
        if self.topology == FOUND:
            return None
        return self.topology

    def take_sites(
        self,
        channels: Mapping[str, int],
        between: Mapping[str, Sequence[Part]],
        layouts: Mapping[str, Layout] = MappingProxyType({}),
    ) -> None:
        """Takes the sites that :meth:`probe` has found before: their channels in execution order, the layers between
        source and sink, and the layouts of those that have one of their own."""
        known = {name: Between(tuple(parts)) for name, parts in between.items()}
        self._place(channels, known, layouts)

    def _place(
        self,
        channels: Mapping[str, int],
        between: Mapping[str, Between],
        layouts: Mapping[str, Layout],
    ) -> None:
        self.between = {name: layers.parts for name, layers in between.items()}
        places = []
        for name, count in channels.items():
            layout = layouts.get(name, Layout(self.topology))
            places.append(place_of(self.model, name, count, layout, between.get(name)))
        self.sites = tuple(places)

    def lies_inside(self, slot: str, other: str) -> bool:
        between = Between(self.between.get(other, ()))
        return self._paths[slot].sink in between.inner

    @property
    def possible_slots(self) -> tuple[str, ...]:
        return row_major(self.paths)

    def _use_slots(self, names: set[str]) -> None:
        # The channels are 0 until `probe` fills in what it finds.
        self.sites = tuple(Place(name, 0, self._paths[name].source is not None) for name in row_major(names))

    def train(self, mode: bool = True) -> Self:
        """Sets the mode, except for frozen layers: those in eval mode when the model was grafted in train mode."""
        super().train(mode)
        if mode:
            for module in self._frozen:
                module.eval()
        return self

    @contextmanager
    def _hooked(
        self,
        hook: SiteHook,
        vacant: Collection[int] = (),
    ) -> Iterator[None]:
        """Registers hooks at all but the ``vacant`` sites while the network runs, so that copies and saved files never
        contain one.

        They act only in the calling thread, so that several threads can use a grown network.
        """
        thread = threading.get_ident()

        def at_sink(
            site: int,
            frame: SourceFrame | None,
            _module: nn.Module,
            _inputs: tuple[object, ...],
            output: object,
        ) -> Any:
            if threading.get_ident() != thread:
                return None
            h: Any = features_of(output)  # a tensor, as `probe` has checked
            source = h
            if frame is not None:
                source = frame.take()
            return with_features(output, hook(site, Features(h, source)))

        with ExitStack() as hooks:
            for site, place in enumerate(self.sites):
                if site in vacant:
                    continue
                path = self._paths[place.name]
                frame = None
                if path.source is not None:
                    frame = SourceFrame(path)
                for _, handle in hook_site(self.model, path, partial(at_sink, site, frame), frame):
                    hooks.callback(handle.remove)
            yield


def graft(
    model: nn.Module,
    sites: Sites,
    topology: str | None = None,
    example: Any = None,
) -> GraftedHost:
    """Makes a host of ``model`` with a slot on the output of each named submodule; the model is used, not copied.

    Args:
        model: maps inputs [B, ...] to logits, [B, classes] or [B, T, classes], or to an object with ``logits``, as the
            models of Hugging Face do. Inputs may be several: a dict of its arguments by name, or a tuple of them.
        sites: paths of submodules, as in ``model.named_modules()``; or ``"fc1 -> fc2"``: seeds read the input of the
            first submodule and add to the output of the second. A list of them; a dict that names each slot (``r0c0``:
            row 0, column 0); or ``"auto"``, which needs ``example``: those of :func:`esper.find_sites`.
        topology: layout of the outputs of those submodules, or of the first elements of those that are tuples: ``cnn``
            for [B, C, H, W], with one spatial dimension ``cnn1d``, with three ``cnn3d``; ``transformer`` for [B, T, D],
            of which no position sees a later one, or ``encoder``, of which each sees all; ``mlp`` for [B, D]. None: the
            layout of each site is found in a pass, whether it is causal is measured there, and dimensions may have
            another order.
        example: inputs to probe the host with; without them, an env does it with the first samples of its task.

    Raises:
        ConfigError: unknown topology or submodule, invalid slot names, two slots on one submodule, or features that do
            not fit the topology's seeds.
    """
    named = named_sites(model, sites, example, most_runs=1)
    check_sites(model, named, topology)
    host = GraftedHost(model, named, topology)
    if example is not None:
        host.probe(as_inputs(example))
    return host
