"""Need: how much the loss of a host would fall if the layer at a vacant slot had more units.

At each vacant slot with a source stands a probe: a widening, or a LoRA where units cannot be added, with fixed draws.
Its last factor is zero, as that of any such seed at birth, and stays zero, so that the host computes what it would
without it. The gradient of that factor says how fast the loss would fall if the probe were planted and learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from esper.core.blend import Seed, blend
from esper.core.blueprints.source import (
    extended_weight,
    last_factor,
    low_rank,
    low_rank_obstacle,
    widened,
    widening_obstacle,
)
from esper.core.place import Features, Place
from esper.core.ramps import BlendOperator
from esper.core.site import Site, guard_group_norm
from esper.data.objective import PAD
from esper.data.split import Split
from esper.hosts.host import SiteHook, kept_modes
from esper.ops.cross_entropy import cross_entropy_gradient
from esper.ops.tape import Shape, Tape, Unsupported
from esper.training.batches import BatchLoader
from esper.training.delta import delta_of
from esper.training.host_training import HostTraining
from esper.training.native_program import Arrival, alpha_of, end_section, route_of, training_roles, write_delta
from esper.training.rng import RngHandle, RngStream, derive_seed, has_dropout, own_dropout, seeded
from esper.training.shadow import ShadowBuffers, copied_buffers
from esper.training.step import ALPHA

SHARE = 1.0
"""Units of a widening probe, as a share of the layer's."""
RANK = 2
"""Rank of a LoRA probe."""
LEAST = 4
"""Min samples of both batches together; they are two halves of one of the task's batches."""


@dataclass(frozen=True)
class Probe:
    """A seed that is never planted, in the memory of the meter only."""

    number: int
    """Index of its site in the order of execution."""
    seed: Seed
    factor: nn.Parameter
    """Its last weights, which are zero."""
    layer: nn.Parameter
    """Weights of the host's layer that the factor would extend, or change."""


def probe_of(site: Site, number: int, draw: int) -> Probe | None:
    """Makes a probe for a site with random numbers of the seed ``draw``; None for a site that has none."""
    place = site.place
    make = _maker(place)
    layer = extended_weight(place)
    if make is None or layer is None:
        return None
    with seeded(draw):
        body = make(place)
    factor = last_factor(body).get_parameter("weight")
    seed = Seed(body, BlendOperator.ADD, place.channels, place.topology)
    guard_group_norm(seed)
    return Probe(number, seed.to(layer.device, layer.dtype).train(), factor, layer)


def _maker(place: Place) -> Callable[[Place], nn.Module] | None:
    if not place.has_source or place.obstacle:
        return None
    if widening_obstacle(place.layers) is None:
        return partial(widened, share=SHARE)
    if low_rank_obstacle(place, RANK) is None:
        return partial(low_rank, rank=RANK)
    return None


class Probes:
    """The probes at n vacant slots, which one pass measures together: none of them changes what the others see."""

    def __init__(self, probes: Sequence[Probe]) -> None:
        self.seeds = {probe.number: probe.seed for probe in probes}
        """By the number of their site."""
        self.weights = [probe.factor for probe in probes] + [probe.layer for probe in probes]
        """Those that gradients are taken of: n factors, then the n layers."""
        device = self.weights[0].device
        sizes = [weight.numel() for weight in self.weights]
        self.sites = torch.tensor(list(self.seeds), device=device)
        self._sizes = torch.tensor(sizes, device=device)
        self._owners = torch.arange(len(sizes), device=device).repeat_interleave(self._sizes)
        self._factors = sum(sizes[: len(probes)])

    def need(self, first: Tensor, second: Tensor) -> Tensor:
        """Returns the need of n slots, float64 [n]: (g1 · g2 / elements) of the factor over |(h1 + h2) / 2|² / elements
        of the layer.

        Args:
            first: gradients on one batch, g1 of the factors and h1 of the layers.
            second: the same on another batch, g2 and h2.

        g1 · g2 estimates a squared gradient without the noise of batches, which is independent in the two: it is 0 on
        average, of either sign, where there is nothing to learn. The layer's own h1 · h2 would be as small late in
        training, and a quotient of two noises has no size. So its scale is the squared mean of both gradients, which
        equals h1 · h2 where the batches agree, and is half the squared noise where they do not: it is never negative,
        and need falls to 0. NaN where the layer has no gradient, or gradients are not finite.
        """
        products = first * second
        products[self._factors :] = ((first + second) / 2)[self._factors :].square()
        sums = torch.zeros(len(self._sizes), dtype=torch.float64, device=first.device)
        means = sums.index_add_(0, self._owners, products.double()) / self._sizes
        factors, layers = means.view(2, -1)
        need = factors / layers
        return torch.where(layers.isfinite() & need.isfinite(), need, torch.nan)


class NeedMeter:
    """Measures the need at the vacant slots of one host. It changes no bit of the host's training.

    Batches come from a generator of the meter's own, buffers are copies, and no gradient is stored. A host with native
    passes is measured by them.
    """

    def __init__(self, training: HostTraining) -> None:
        self.training = training
        self.values = torch.full((len(training.sites),), torch.nan, dtype=torch.float64, device=training.device)
        """Need by site, in the order of execution, on the device; NaN where it was not measured."""
        self._order = torch.Generator()
        self._dropout = RngHandle(torch.Generator(training.device))
        self._loader: BatchLoader | None = None
        self._built = 0
        self.forget()

    def forget(self) -> None:
        """Drops the probes of layers that have got other shapes since."""
        self._made: dict[int, Probe] | None = None
        self._chosen: dict[tuple[int, ...], Probes] = {}
        self._shadow: ShadowBuffers | None = None
        self._built += 1  # what was captured for the dropped ones is not replayed

    def measure(self) -> None:
        """Measures each vacant slot on two halves of a batch, into ``values``."""
        training = self.training
        made = self._all_probes()
        vacant = tuple(number for number in made if training.sites[number].seed is None)
        self.values.fill_(torch.nan)
        self._loader = self._loader or _loader_of(training)
        if self._loader is None or not vacant:
            return
        if vacant not in self._chosen:
            self._chosen[vacant] = Probes([made[number] for number in vacant])
        self._shuffle(self._loader)
        work = partial(self._measure, self._chosen[vacant], self._loader)
        training.repeat(("need", self._built, vacant), work)

    def _shuffle(self, loader: BatchLoader) -> None:
        training = self.training
        seed = derive_seed(training.run_seed, training.index, training.episode, RngStream.NEED, training.epoch)
        self._order.manual_seed(seed)
        if has_dropout(training.host):
            self._dropout.generator.manual_seed(seed)
        loader.restart(seed, 0)
        loader.shuffle(0, self._order)

    def _measure(self, probes: Probes, loader: BatchLoader) -> None:
        x, y = loader.batch(0)
        half = len(y) // 2
        gradients = self._native(probes) or partial(self._eager, probes)
        first = gradients(x[:half], y[:half])
        second = gradients(x[half : 2 * half], y[half : 2 * half])
        self.values[probes.sites] = probes.need(first, second)

    def _native(self, probes: Probes) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Returns the compiled form of :meth:`_eager`; None if there is none."""
        native = self.training.native
        if native is None:
            return None
        key = ("need", self._built, *training_roles(self.training))

        def write() -> NativeNeed:
            with self._passing(probes):
                return NativeNeed(self.training, native.shape(), probes)

        try:
            return native.program(key, write)
        except Unsupported:
            return None

    def _eager(self, probes: Probes, x: Tensor, y: Tensor) -> Tensor:
        """Returns the gradients of the loss of a batch in training mode, flat: factors, then layers."""
        training = self.training
        with self._passing(probes), training.arithmetic.casting():
            outputs = training.host.forward_with_hook(x, _probing(training, probes))
            loss, _ = training.task.objective.measure(outputs, y, training.config.task.label_smoothing)
            gradients = torch.autograd.grad(training.arithmetic.scaled(loss), probes.weights, materialize_grads=True)
        return torch.cat([gradient.flatten() for gradient in gradients])

    @contextmanager
    def _passing(self, probes: Probes) -> Iterator[None]:
        """Lends the host copies of its buffers, other random numbers, and train mode; layers learn meanwhile."""
        training = self.training
        host = training.host
        frozen = [weight for weight in probes.weights if not weight.requires_grad]
        compiled = getattr(host, "compiled", None)
        with ExitStack() as stack:
            stack.enter_context(kept_modes(host))
            host.train()
            for layer in training.frozen:
                layer.eval()
            stack.enter_context(self._shadows().in_place())
            stack.enter_context(copied_buffers(training.seeds()))
            stack.enter_context(training.global_draws())
            generator = training.draws.generator
            try:
                training.draws.generator = self._dropout.generator
                if compiled is not None:  # parts of a batch would be compiled, too
                    host.compiled = None  # type: ignore[union-attr]
                for weight in frozen:
                    weight.requires_grad_(True)
                yield
            finally:
                for weight in frozen:
                    weight.requires_grad_(False)
                if compiled is not None:
                    host.compiled = compiled  # type: ignore[union-attr]
                training.draws.generator = generator

    def _all_probes(self) -> dict[int, Probe]:
        if self._made is None:
            self._made = {}
            for number, site in enumerate(self.training.sites):
                probe = probe_of(site, number, derive_seed(0, self.training.index, 0, RngStream.NEED, number))
                if probe is not None:
                    own_dropout(probe.seed, self._dropout)
                    self._made[number] = probe
        return self._made

    def _shadows(self) -> ShadowBuffers:
        """Returns copies of the host's buffers, with the values that these have now."""
        if self._shadow is None:
            self._shadow = ShadowBuffers(self.training.host)
        else:
            self._shadow.refill()
        return self._shadow


def _loader_of(training: HostTraining) -> BatchLoader | None:
    """Returns a reader of single batches from memory; None for streamed data, or too little of it."""
    task = training.task
    if not isinstance(task.train, Split) or len(task.train) < LEAST:
        return None
    size = min(max(training.config.task.batch_size, LEAST), len(task.train))
    return BatchLoader(task.train, size, size, task.augmentation, training.arithmetic.image_dtype)


def _probing(training: HostTraining, probes: Probes) -> SiteHook:
    """Returns the function for sites in a pass with ``probes``; blended seeds act, and incubating ones do not."""
    seeds = probes.seeds

    def hook(number: int, at: Features) -> Tensor:
        site = training.sites[number]
        if number in seeds:
            return at.h + seeds[number](at.source).to(at.h.dtype)
        if site.on:
            delta = delta_of(site, at, track_finite=False)
            return blend(at.h, delta, training.alphas[ALPHA, number])
        return at.h

    return hook


class NativeNeed:
    """The pass of ``NeedMeter._eager`` in compiled code, for logits [B, C] of classes. Raises Unsupported."""

    def __init__(
        self,
        training: HostTraining,
        shape: Shape,
        probes: Probes,
    ) -> None:
        self.smoothing = training.config.task.label_smoothing
        tape = Tape(shape)
        tape.learning = set(map(id, probes.weights))

        def at_site(number: int, at: Arrival) -> int:
            site = training.sites[number]
            if number in probes.seeds:
                return tape.plus(at.h, tape.add(probes.seeds[number], at.source))
            if site.on:
                delta = write_delta(tape, site, at.source, track_finite=False)
                return tape.plus(at.h, delta, alpha_of(training, ALPHA, number))
            return at.h

        end_section(tape, route_of(training.host).write(tape, at_site, Arrival(0, 0, 0, {})))
        self.program = tape.program()
        places = {id(weight): place for place, weight in enumerate(self.program.parameters)}
        self.gradients = [self.program.gradients[places[id(weight)]] for weight in probes.weights]

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Runs a batch for its logits, and again with the gradient of their loss."""
        logits = self.program.run(x).flatten(1)
        gradient = cross_entropy_gradient(logits, y, PAD, self.smoothing)
        self.program.run(x, gradient[:, :, None, None])
        return torch.cat([gradient.flatten() for gradient in self.gradients])
