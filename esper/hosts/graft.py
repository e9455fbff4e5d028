"""Slots in any ``nn.Module``: forward hooks read and change the outputs of named submodules."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

from esper.config import ConfigError
from esper.hosts.host import At, Host, row_major
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

    def walk(self, x: Tensor, at: At, vacant: Collection[int] = ()) -> Tensor:
        with self._hooked(at):
            return self.model(x.clone())  # type: ignore[no-any-return]  # the model may overwrite its inputs

    def forward_from(self, x: Tensor, site: int, h: Tensor, at: At, vacant: Collection[int] = ()) -> Tensor:
        learning = torch.is_grad_enabled()

        def enter(reached: int, features: Tensor) -> Tensor:
            if reached < site:
                return features
            if reached == site:
                torch.set_grad_enabled(learning)
                return h
            return at(reached, features)

        with torch.set_grad_enabled(False), self._hooked(enter):
            return self.model(x.clone())  # type: ignore[no-any-return]

    def probe(self, x: Tensor) -> None:
        found: dict[str, Tensor] = {}

        def see(site: int, output: Tensor) -> Tensor:
            name = self.sites[site].name
            if name in found:
                raise ConfigError(f"slot {name}: {self.paths[name]} runs more than once in a forward pass")
            self._check_features(name, output, len(x))
            found[name] = output
            return output

        training = self.training
        with torch.no_grad():
            self.eval().walk(x, see)
        self.train(training)
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

    def _check_features(self, name: str, output: object, batch: int) -> None:
        rank = LAYOUTS[self.topology][0]
        if not isinstance(output, Tensor):
            raise ConfigError(f"slot {name}: {self.paths[name]} returns {type(output).__name__}; a site is one tensor")
        if output.is_nested:
            raise ConfigError(f"slot {name}: {self.paths[name]} returns nested tensors; set enable_nested_tensor=False")
        if output.dim() != rank or not output.is_floating_point():
            raise ConfigError(
                f"slot {name}: {self.paths[name]} returns {output.dtype} of shape {tuple(output.shape)}; "
                f"{self.topology} seeds need floating-point features with {rank} dimensions"
            )
        if output.shape[0] != batch:
            raise ConfigError(
                f"slot {name}: {self.paths[name]} returns shape {tuple(output.shape)} for {batch} samples; they must "
                "come first (batch_first=True in torch's transformers)"
            )

    @contextmanager
    def _hooked(self, at: At) -> Iterator[None]:
        """Registers hooks while the network runs, so that copies and saved files never contain one.

        They act only in the calling thread, so that several threads can use a grown network.
        """
        here = threading.get_ident()

        def hook(site: int, _module: nn.Module, _inputs: tuple[object, ...], output: Tensor) -> Tensor | None:
            return at(site, output) if threading.get_ident() == here else None

        with ExitStack() as hooks:
            for site, place in enumerate(self.sites):
                module = self.model.get_submodule(self.paths[place.name])
                hooks.callback(module.register_forward_hook(partial(hook, site)).remove)
            yield


def graft(
    model: nn.Module, sites: Mapping[str, str], topology: str = "cnn", example: Tensor | None = None
) -> GraftedHost:
    """Makes a host of ``model`` with a slot on the output of each named submodule; the model is used, not copied.

    Args:
        model: maps inputs [B, ...] to logits, [B, classes] or [B, T, classes].
        sites: slot name (``r0c0``: row 0, column 0) to the path of a submodule, as in ``model.named_modules()``.
        topology: ``cnn`` if those outputs are [B, C, H, W], ``transformer`` for [B, T, D], ``mlp`` for [B, D].
        example: inputs to probe the host with; without them, an env does it with the first samples of its task.

    Raises:
        ConfigError: unknown topology or submodule, invalid slot names, two slots on one submodule, or features that do
            not fit the topology's seeds.
    """
    check_sites(model, sites, topology)
    host = GraftedHost(model, sites, topology)
    if example is not None:
        host.probe(example)
    return host


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
