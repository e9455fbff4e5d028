"""Need: how much of the loss is left that the layer at a vacant slot cannot lower by its own weights.

A widening gives the layer at its sink more inputs. What this layer should change is the negative gradient of the loss
at its output, v. What it can change by its weights is linear in its inputs b. The part of v that is not, in a least
squares fit on one batch that is judged on another, only other inputs could express: this is the expressivity bottleneck
of Verbockhaven et al. 2024, https://arxiv.org/abs/2405.19816. Need is that share of v times the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from esper.core.blend import blend
from esper.core.blueprints.source import inputs_of, is_matrix, reader_of
from esper.core.place import Features, Place
from esper.core.site import Site
from esper.data.objective import PAD, ClassObjective
from esper.data.split import Split
from esper.hosts.host import kept_modes
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
MAX_INPUTS = 1024
"""Max inputs of a layer that is measured: the fit takes the time of their number cubed."""
MAX_ROWS = 4096
"""Max positions of a batch that a fit reads, evenly spaced."""
Passed = dict[nn.Module, Tensor]
"""A tensor of each layer in a pass."""
RIDGE = 0.01
"""Added to the variances of inputs in a fit, as a share of their mean."""


@dataclass(frozen=True)
class Seen:
    """The measured layers in a pass over a batch."""

    inputs: list[Tensor]
    """Inputs of each layer."""
    gradients: list[Tensor]
    """Gradient of the mean loss at the output of each layer."""
    loss: Tensor
    """Mean loss, []."""

    def at(self, place: int, layer: nn.Module) -> tuple[Tensor, Tensor]:
        """Returns what a layer reads at each position, and the gradient at its output there."""
        return rows_of(layer, self.inputs[place]), columns_of(layer, self.gradients[place])


def measured_layer(layer: nn.Module | None) -> bool:
    """Whether need can be measured at a layer: a linear one, or a convolution of at most two dimensions."""
    if layer is None:
        return False
    taps = 1
    if isinstance(layer, nn.Conv1d | nn.Conv2d):
        if layer.groups > 1:
            return False
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            return False
        taps = layer.weight[0, 0].numel()
    elif not is_matrix(layer):
        return False
    return inputs_of(layer) * taps <= MAX_INPUTS


def rows_of(layer: nn.Module, inputs: Tensor) -> Tensor:
    """Returns what each output position of a layer reads of its ``inputs``, [positions, numbers]."""
    if isinstance(layer, nn.Conv1d | nn.Conv2d):
        flat = isinstance(layer, nn.Conv1d)

        def pair(size: Any, of_flat: int) -> Any:
            if flat:
                return (of_flat, *size)
            return size

        patches = functional.unfold(
            inputs.unsqueeze(2) if flat else inputs,
            kernel_size=pair(layer.kernel_size, 1),
            dilation=pair(layer.dilation, 1),
            padding=pair(layer.padding, 0),
            stride=pair(layer.stride, 1),
        )
        return patches.transpose(1, 2).flatten(0, 1)
    return inputs.reshape(-1, inputs_of(layer))


def columns_of(layer: nn.Module, outputs: Tensor) -> Tensor:
    """Returns the ``outputs`` of a layer at each position, [positions, units], in the order of :func:`rows_of`."""
    if isinstance(layer, nn.Conv1d | nn.Conv2d):
        by_position = outputs.flatten(2).transpose(1, 2)
        return by_position.flatten(0, 1)
    return outputs.reshape(-1, outputs.shape[-1])


def inexpressible(
    first: tuple[Tensor, Tensor],
    second: tuple[Tensor, Tensor],
) -> Tensor:
    """Returns the share of the wanted change of a layer that its inputs cannot express, a scalar.

    It is 1 − tr(G1ᵀ S⁻¹ G2) / |v|², with G = bᵀ v of each batch, the second moments S of the inputs of both, and the
    mean |v|² of both. What a batch shows by chance is independent in the two, and adds nothing to the product on
    average, so that the share is about 1 where the inputs explain nothing, and may exceed it. NaN where nothing is to
    be changed.

    Args:
        first: inputs [n, d] and gradients at the output [n, units] by position, on one batch.
        second: the same on another batch.
    """
    products = []
    moments_of = []
    squares = []
    for inputs, gradients in (first, second):
        step = -(-len(inputs) // MAX_ROWS)
        b = inputs[::step].double()
        v = gradients[::step].double()
        products.append(b.T @ v / len(b))
        moments_of.append(b.T @ b / len(b))
        squares.append(v.square().sum() / len(v))

    moments = (moments_of[0] + moments_of[1]) / 2
    whole = (squares[0] + squares[1]) / 2
    variances = moments.diagonal()
    # Dead inputs have only zeros, by which nothing can be divided.
    least = torch.finfo(moments.dtype).tiny
    variances.add_(RIDGE * variances.mean() + least)
    fit, _ = torch.linalg.solve_ex(moments, products[1])
    explained = (products[0] * fit).sum()
    share: Tensor = 1 - explained / whole
    return share


@contextmanager
def watched(layers: Iterable[nn.Module]) -> Iterator[tuple[Passed, Passed]]:
    """Yields two dicts that get the inputs and outputs of ``layers`` in a pass; loss gradients reach the outputs."""
    inputs: Passed = {}
    outputs: Passed = {}

    def keep(
        layer: nn.Module,
        args: tuple[Tensor],
        output: Tensor,
    ) -> Tensor:
        inputs[layer] = args[0].detach().clone()  # later layers may work in place
        outputs[layer] = output
        return output.clone()

    with ExitStack() as hooks:
        for layer in layers:
            handle = layer.register_forward_hook(keep)
            hooks.callback(handle.remove)
        yield inputs, outputs


class NeedMeter:
    """Measures the need at the vacant slots of one host. It changes no bit of the host's training.

    Batches come from a generator of the meter's own, buffers are copies, and no gradient is stored. A host with native
    passes is measured by them. Slots without a source, and data that is streamed, have no need.
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
            self.values[number] = loss * share

    def _layer_at(self, place: Place) -> nn.Module | None:
        """Returns the layer whose need is measured at a place, which is looked up once; None if nothing is measured."""
        known = self._layers.get(place.name)
        if known is None or known[0] is not place:
            layer = reader_of(place)
            known = (place, layer if measured_layer(layer) else None)
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
