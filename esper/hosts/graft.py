"""Slots in any ``nn.Module``: forward hooks read and change the outputs of named submodules."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from esper.config import ConfigError
from esper.hosts.host import Host, SiteHook, kept_modes, row_major
from esper.hosts.inputs import Inputs, as_inputs, call
from esper.hosts.outputs import features_of, logits_of, with_features
from esper.seeds.site import SlotSite

LAYOUTS: Mapping[str, tuple[int, int]] = {"cnn": (4, 1), "transformer": (3, 2), "encoder": (3, 2), "mlp": (2, 1)}
"""Rank of the features and the index of their channel dimension, by topology."""


class GraftedHost(Host):
    """Any network with slots on the outputs of some of its submodules; made by :func:`graft`.

    Nothing is added to the network: ``host.model`` and its state_dict stay as they are. :meth:`forward_from` reruns the
    layers before the site, without gradients, because a module cannot be entered half-way.
    """

    in_place = True  # a layer such as ReLU(inplace=True) may follow a site

    def __init__(self, model: nn.Module, paths: Mapping[str, str], topology: str) -> None:
        super().__init__()
        self.model = model
        self.paths = dict(paths)
        """Path of the submodule that has the slot on its output, by slot name."""
        self.topology = topology
        self._frozen = [module for module in model.modules() if not module.training] if model.training else []
        # `probe` fills in the order and the channels.
        self.sites = tuple(SlotSite(name, 0) for name in row_major(paths))

    def forward_with_hook(self, x: Inputs, hook: SiteHook, vacant: Collection[int] = ()) -> Tensor:
        with self._hooked(hook):
            return self._run(x)

    def forward_from(self, x: Inputs, site: int, h: Tensor, hook: SiteHook, vacant: Collection[int] = ()) -> Tensor:
        learning = torch.is_grad_enabled()

        def enter(reached: int, features: Tensor) -> Tensor:
            if reached < site:
                return features
            if reached == site:
                torch.set_grad_enabled(learning)
                return h
            return hook(reached, features)

        with torch.set_grad_enabled(False), self._hooked(enter):
            return self._run(x)

    def _run(self, x: Inputs) -> Tensor:
        return logits_of(call(self.model, x.clone()))  # type: ignore[no-any-return]  # it may overwrite its inputs

    def probe(self, x: Inputs) -> None:
        found: dict[str, Tensor] = {}

        def see(site: int, output: Tensor) -> Tensor:
            name = self.sites[site].name
            if name in found:
                raise ConfigError(f"slot {name}: {self.paths[name]} runs more than once in a forward pass")
            check_features(name, self.paths[name], output, self.topology, len(x))
            found[name] = output
            return output

        with kept_modes(self), torch.no_grad():
            self.eval().forward_with_hook(x, see)
        if missing := [name for name in self.paths if name not in found]:
            where = ", ".join(f"{name} ({self.paths[name]})" for name in missing)
            raise ConfigError(f"the forward pass never runs the submodule of slot {where}")
        channels = LAYOUTS[self.topology][1]
        self.sites = tuple(SlotSite(name, h.shape[channels]) for name, h in found.items())

    def train(self, mode: bool = True) -> Self:
        """Sets the mode, except for frozen layers: those in eval mode when the model was grafted in train mode."""
        super().train(mode)
        for module in self._frozen if mode else ():
            module.eval()
        return self

    @contextmanager
    def _hooked(self, hook: SiteHook) -> Iterator[None]:
        """Registers hooks while the network runs, so that copies and saved files never contain one.

        They act only in the calling thread, so that several threads can use a grown network.
        """
        here = threading.get_ident()

        def on_output(site: int, _module: nn.Module, _inputs: tuple[object, ...], output: object) -> Any:
            if threading.get_ident() != here:
                return None
            return with_features(output, hook(site, features_of(output)))  # type: ignore[arg-type]  # checked by `probe`

        with ExitStack() as hooks:
            for site, place in enumerate(self.sites):
                module = self.model.get_submodule(self.paths[place.name])
                hooks.callback(module.register_forward_hook(partial(on_output, site)).remove)
            yield


def graft(model: nn.Module, sites: Mapping[str, str], topology: str = "cnn", example: Any = None) -> GraftedHost:
    """Makes a host of ``model`` with a slot on the output of each named submodule; the model is used, not copied.

    Args:
        model: maps inputs [B, ...] to logits, [B, classes] or [B, T, classes], or to an object with ``logits``, as the
            models of Hugging Face do. Inputs may be several: a dict of its arguments by name, or a tuple of them.
        sites: slot name (``r0c0``: row 0, column 0) to the path of a submodule, as in ``model.named_modules()``.
        topology: ``cnn`` if those outputs, or the first elements of those that are tuples, are [B, C, H, W],
            ``transformer`` for [B, T, D], ``mlp`` for [B, D]. Seeds of a ``transformer`` see no later position, those
            of an ``encoder``, also [B, T, D], see all.
        example: inputs to probe the host with; without them, an env does it with the first samples of its task.

    Raises:
        ConfigError: unknown topology or submodule, invalid slot names, two slots on one submodule, or features that do
            not fit the topology's seeds.
    """
    check_sites(model, sites, topology)
    host = GraftedHost(model, sites, topology)
    if example is not None:
        host.probe(as_inputs(example))
    return host


def check_features(name: str, path: str, h: object, topology: str, batch: int | None = None) -> None:
    """Raises ConfigError if features ``h`` of ``batch`` samples cannot hold the seeds of slot ``name``."""
    rank, where = LAYOUTS[topology][0], f"slot {name}: {path}"
    if not isinstance(h, Tensor):
        raise ConfigError(f"{where} returns {type(h).__name__}; a site is one tensor, or the first of a tuple")
    if h.is_nested:
        raise ConfigError(f"{where} returns nested tensors; set enable_nested_tensor=False")
    if h.dim() != rank or not h.is_floating_point():
        raise ConfigError(
            f"{where} returns {h.dtype} of shape {tuple(h.shape)}; {topology} seeds need floating-point features with "
            f"{rank} dimensions"
        )
    if batch is not None and h.shape[0] != batch:
        raise ConfigError(
            f"{where} returns shape {tuple(h.shape)} for {batch} samples; they must come first (batch_first=True in "
            "torch's transformers and recurrent layers)"
        )


def check_sites(model: nn.Module, sites: Mapping[str, str], topology: str) -> None:
    """Raises ConfigError for what :func:`graft` refuses without a forward pass."""
    if topology not in LAYOUTS:
        raise ConfigError(f"unknown topology {topology!r}; known: {', '.join(LAYOUTS)}")
    known = [path for path, _ in model.named_modules() if path]
    for name, path in sites.items():
        if path not in known:
            raise ConfigError(f"slot {name}: the model has no submodule {path!r}; it has: {', '.join(known)}")
    if not sites or len(set(sites.values())) < len(sites):
        raise ConfigError(f"sites must name one or more slots, each on its own submodule, not {dict(sites)}")
    try:
        row_major(sites)
    except ValueError as error:
        raise ConfigError(str(error)) from None
