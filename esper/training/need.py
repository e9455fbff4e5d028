"""Need of the vacant slots of a host in training, see ``esper.hosts.need``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from esper.core.blend import blend
from esper.core.blueprints.source import is_matrix
from esper.core.place import Features, Place
from esper.core.site import Site
from esper.data.objective import PAD, ClassObjective
from esper.data.split import Split
from esper.hosts.host import kept_modes
from esper.hosts.need import Seen, inexpressible, measured_at, need_at, watched
from esper.ops.cross_entropy import cross_entropy_gradient
from esper.ops.tape import LAYERS, Tape, Unsupported
from esper.ops.tape_look import look
from esper.training.batches import BatchLoader
from esper.training.delta import delta_of
from esper.training.host_training import HostTraining
from esper.training.native_data import NativeData
from esper.training.native_program import (
    Arrival,
    alpha_of,
    end_section,
    route_of,
    training_roles,
    write_delta,
)
from esper.training.rng import RngHandle, RngStream, derive_seed, has_dropout
from esper.training.shadow import ShadowBuffers, copied_buffers
from esper.training.step import ALPHA

LEAST = 4
"""Min samples of both batches together; they are two halves of one of the task's batches."""


class NeedMeter:
    """Measures the need at the vacant slots of one host. It changes no bit of the host's training.

    Batches come from a generator of the meter's own, buffers are copies, and no gradient is stored. A host with native
    passes is measured by them. Slots of other kinds than :func:`measured_at` knows, and streamed data, have no need.
    """

    def __init__(self, training: HostTraining, every: int = 1) -> None:
        self.training = training
        self.every = every
        """Epochs between measurements; 0: none."""
        self.values = torch.full(
            (len(training.sites),),
            torch.nan,
            dtype=torch.float64,
            device=training.device,
        )
        """Need by site in nats or other units of the loss, in the order of execution; NaN where it was not measured."""
        self._order = torch.Generator()
        self._dropout = RngHandle(torch.Generator(training.device))
        self._loader: BatchLoader | None = None
        self._shadow: ShadowBuffers | None = None
        self._layers: dict[str, tuple[Place, nn.Module | None]] = {}
        """By site, its place and the layer there that is measured."""

    @property
    def due(self) -> bool:
        """Whether need is measured after this epoch."""
        return self.every > 0 and self.training.epoch % self.every == 0

    def measure_if_due(self) -> None:
        if self.due:
            self.measure()

    def in_order(self, sites: Sequence[Site], values: Tensor) -> list[float]:
        """Returns transferred ``values`` in the order of ``sites``."""
        names = list(self.training.site_by_name)
        by_name = dict(zip(names, values.tolist(), strict=True))
        return [by_name[site.name] for site in sites]

    def measure(self) -> None:
        """Measures each vacant slot on two halves of a batch, into ``values``."""
        training = self.training
        self.values.fill_(torch.nan)
        layers = {}
        for number, site in enumerate(training.sites):
            layer = self._layer_at(site.place)
            if site.seed is None and layer is not None:
                layers[number] = layer
        self._loader = self._loader or _loader_of(training)
        if self._loader is None or not layers:
            return
        self._shuffle(self._loader)
        x, y = self._loader.batch(0)
        half = len(y) // 2
        see = self._native(layers) or partial(self._eager, layers)
        first = see(x[:half], y[:half])
        second = see(x[half : 2 * half], y[half : 2 * half])
        loss = (first.loss + second.loss) / 2
        for place, (number, layer) in enumerate(layers.items()):
            share = inexpressible(
                first.at(place, layer),
                second.at(place, layer),
            )
            self.values[number] = need_at(training.sites[number].place, loss, share)

    def _layer_at(self, place: Place) -> nn.Module | None:
        """Returns the layer whose need is measured at a place, which is looked up once; None if nothing is measured."""
        known = self._layers.get(place.name)
        if known is None or known[0] is not place:
            known = (place, measured_at(place))
            self._layers[place.name] = known
        return known[1]

    def _shuffle(self, loader: BatchLoader) -> None:
        training = self.training
        seed = derive_seed(
            training.run_seed,
            training.index,
            training.episode,
            RngStream.NEED,
            training.epoch,
        )
        self._order.manual_seed(seed)
        if has_dropout(training.host):
            self._dropout.generator.manual_seed(seed)
        loader.restart(seed, 0)
        loader.shuffle(0, self._order)

    def _native(self, layers: Mapping[int, nn.Module]) -> Callable[[Tensor, Tensor], Seen] | None:
        """Returns the compiled form of :meth:`_eager`; None for a host that lacks this form."""
        native = self.training.native
        if native is None:
            return None
        key = ("need", tuple(layers), *training_roles(self.training))

        def write() -> NativePass:
            with self._passing(layers):
                return NativePass(self.training, native.data, layers)

        try:
            return native.program(key, write)
        except Unsupported as reason:
            native.reasons[str(reason)] += 1
            return None

    def _eager(
        self,
        layers: Mapping[int, nn.Module],
        x: Tensor,
        y: Tensor,
    ) -> Seen:
        """Runs a batch in training mode and sees what the loss wants of ``layers``."""
        training = self.training
        with self._passing(layers), training.arithmetic.casting(), watched(layers.values()) as (inputs, outputs):
            logits = training.host.forward_with_hook(x, self._blending)
            smoothing = training.config.task.label_smoothing
            loss, _ = training.task.objective.measure(logits, y, smoothing)
            gradients = torch.autograd.grad(
                training.arithmetic.scaled(loss),
                [outputs[layer] for layer in layers.values()],
                materialize_grads=True,
            )
        return Seen(
            [inputs[layer] for layer in layers.values()],
            list(gradients),
            loss.detach(),
        )

    def _blending(self, number: int, at: Features) -> Tensor:
        """The function for sites: blended seeds act, and incubating ones do not."""
        site = self.training.sites[number]
        if not site.on:
            return at.h
        delta = delta_of(site, at, track_finite=False)
        return blend(at.h, delta, self.training.alphas[ALPHA, number])

    @contextmanager
    def _passing(self, layers: Mapping[int, nn.Module]) -> Iterator[None]:
        """Lends the host copies of its buffers, other random numbers, and train mode; frozen layers learn meanwhile."""
        training = self.training
        host = training.host
        weights = [layer.get_parameter("weight") for layer in layers.values()]
        frozen = [weight for weight in weights if not weight.requires_grad]
        compiled = getattr(host, "compiled", None)
        generator = training.draws.generator
        with ExitStack() as lent:
            lent.enter_context(kept_modes(host))
            host.train()
            for layer in training.frozen:
                layer.eval()
            lent.enter_context(self._shadows().in_place())
            lent.enter_context(copied_buffers(training.seeds()))
            lent.enter_context(training.global_draws())
            try:
                training.draws.generator = self._dropout.generator
                if compiled is not None:  # parts of a batch would be compiled, too
                    host.compiled = None  # type: ignore[assignment]
                for weight in frozen:
                    weight.requires_grad_(True)
                yield
            finally:
                for weight in frozen:
                    weight.requires_grad_(False)
                if compiled is not None:
                    host.compiled = compiled
                training.draws.generator = generator

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
    if not isinstance(task.train, Split):
        return None
    samples = len(task.train)
    if samples < LEAST:
        return None
    wanted = max(training.config.task.batch_size, LEAST)
    size = min(wanted, samples)
    return BatchLoader(
        task.train,
        size,
        size,
        task.augmentation,
        training.arithmetic.image_dtype,
    )


class NativePass:
    """The pass of ``NeedMeter._eager`` in compiled code, for logits [B, C] of classes. Raises Unsupported."""

    def __init__(
        self,
        training: HostTraining,
        data: NativeData,
        layers: Mapping[int, nn.Module],
    ) -> None:
        if data.length > 1 or not isinstance(training.task.objective, ClassObjective):
            raise Unsupported("need has a compiled form for one class a sample")
        self.smoothing = training.config.task.label_smoothing
        weights = [layer.get_parameter("weight") for layer in layers.values()]
        tape = Tape(data.shape)
        tape.learning = set(map(id, weights))

        route = route_of(training.host)

        def at_site(number: int, at: Arrival) -> int:
            site = training.sites[number]
            if not site.on:
                return at.h
            delta = write_delta(tape, route.parts, site, at.source, track_finite=False)
            return tape.plus(at.h, delta, alpha_of(training, ALPHA, number))

        end_section(tape, route.write(tape, at_site, Arrival(0, 0, 0, {})))
        self.program = tape.program()
        kinds = [LAYERS.index(name) for name in ("convolution", "linear")]
        rows = {row[4]: row for row in tape.code if row[0] in kinds}  # by the number of the weights
        numbers = [tape.tensor(weight, learns=True) for weight in weights]
        if not rows.keys() >= set(numbers):
            raise Unsupported("a measured layer is no single layer in compiled code")
        found = [rows[number] for number in numbers]
        self.inputs = [row[1] for row in found]
        self.outputs = [row[3] for row in found]
        self.shapes = tape.shapes
        self.flat = [place for place, layer in enumerate(layers.values()) if is_matrix(layer)]

    def __call__(self, x: Tensor, y: Tensor) -> Seen:
        """Runs a batch for its logits, and again with the gradient of their loss."""
        inputs = self._room(x, self.inputs)
        gradients = self._room(x, self.outputs)
        logits = look(
            self.program,
            x,
            self.inputs,
            inputs,
        )
        loss, gradient = cross_entropy_gradient(
            logits.flatten(1),
            y,
            PAD,
            self.smoothing,
        )
        look(
            self.program,
            x,
            self.outputs,
            output_gradient=gradient[:, :, None, None],
            gradients=gradients,
        )
        for place in self.flat:
            gradients[place] = gradients[place].flatten(1)
        return Seen(inputs, gradients, loss)

    def _room(self, x: Tensor, values: list[int]) -> list[Tensor]:
        """Returns room for the ``values`` of a batch, with zeros, which gradients that no loss depends on keep."""
        return [x.new_zeros((len(x), *self.shapes[value])) for value in values]
