"""A network as a tape: a list of layers on numbered values, which compiled code runs forward and backward.

A tape has one input and no branches but sums and products with earlier values, which is what hosts with seeds need. It
keeps the network's own tensors: they are read and written in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from esper.ops import _native

_native.not_differentiable("tape_pass_", "tape_epoch_sgd_", "tape_epoch_adamw_", "tape_scores_", in_place=True)

TENSORS = {
    "convolution": 2,
    "batch_norm": 5,
    "group_norm": 2,
    "activation": 0,
    "max_pool": 0,
    "average_pool": 0,
    "flatten": 0,
    "scale": 1,
    "multiply": 0,
    "add": 1,
    "detach": 0,
    "guard": 1,
    "pass_through": 0,
    "linear": 2,
    "embedding": 2,
    "attention": 0,
    "running_mean": 0,
}
"""Number of tensors of each kind of layer, which come first among its numbers."""
LAYERS = tuple(TENSORS)
"""Kinds of layers, in the order of csrc/tape/tape.h."""
LOSSES = ("cross_entropy", "squared_error", "binary_cross_entropy")
SCORES = ("accuracy", "explained", "labels")
"""Losses and scores, in the order of csrc/tape/objective.h; the first go together."""
ACROSS_SAMPLES = ("batch_norm", "max_pool", "average_pool", "flatten")
"""Layers that have no form for sequences, whose positions are samples."""
NUMBERS = 16
"""Columns of a program: layer, input, second input, output, and the numbers of the layer."""
MAX_TAPS = 128
"""Largest size of a convolution's kernel."""

ACTIVATIONS: dict[type[nn.Module], int] = {
    nn.ReLU: 0,
    nn.LeakyReLU: 1,
    nn.ELU: 2,
    nn.GELU: 3,
    nn.SiLU: 5,
    nn.Tanh: 6,
    nn.Sigmoid: 7,
}
"""Kinds of activations, in the order of csrc/tape/elementwise.h; 4 is GELU with tanh."""

Shape = tuple[int, int, int]
"""Channels, height and width of a value; a vector [B, D] is (D, 1, 1)."""

HARMLESS_HOOKS: set[Callable[..., Any]] = set()
"""Forward hooks of modules that a tape may leave out."""


class Unsupported(Exception):
    """A layer that no tape can run; the message says which, and why."""


class Tape:
    """A program that is being written, and the tensors of its network.

    Args:
        shape: of the input, without the batch.
        length: of sequences, each position of which is a sample; 1: samples are no sequences.
    """

    def __init__(self, shape: Shape, length: int = 1) -> None:
        self.length = length
        self.shapes: list[Shape] = [shape]
        self.code: list[list[int]] = []
        self.constants: list[tuple[float, float]] = []
        self.tensors: list[Tensor] = []
        self.learns: list[bool] = []
        """By tensor, whether passes backward write its gradient."""
        self.learning: Collection[int] | None = None
        """Ids of the only parameters that learn in the layers written next; None: all that require a gradient."""
        self.evaluates = False
        """Whether modules are written as in eval mode, whatever their own."""
        self.ends: list[int] = []
        """Numbers of instructions up to the end of each section: of a pass with an output, and a loss, of its own."""
        self._numbers: dict[tuple[int, bool], int] = {}  # by the id of a tensor and whether it learns

    def tensor(self, tensor: Tensor | None, learns: bool = False) -> int:
        """Returns the number of a tensor of the network, -1 for None."""
        if tensor is None:
            return -1
        key = (id(tensor), learns)
        number = self._numbers.get(key)
        if number is None:
            number = len(self.tensors)
            self._numbers[key] = number
            self.tensors.append(tensor)
            self.learns.append(learns)
        return number

    def end_section(self) -> None:
        """Ends a section with the last value as its output; the next one may read the values of the first."""
        self.ends.append(len(self.code))

    def parameter(self, parameter: Tensor | None) -> int:
        """Returns the number of a weight or bias of the layer that is being written, -1 for None.

        Raises Unsupported for a parameter that learns and belongs to an earlier layer, too: gradients are written once.
        """
        learns = isinstance(parameter, nn.Parameter) and parameter.requires_grad
        if self.learning is not None:
            learns = learns and id(parameter) in self.learning
        if learns and (id(parameter), True) in self._numbers:
            raise Unsupported("a parameter that several layers share has no compiled form")
        return self.tensor(parameter, learns)

    def shared(self, parameter: Tensor) -> int:
        """Returns the number of an embedding's weight for a layer behind it that has the same, such as a tied head.

        Passes backward reach the layer first: it writes the gradient, and the embedding adds to that.
        """
        learning = self._numbers.get((id(parameter), True))
        if learning is None or (self.learning is not None and id(parameter) not in self.learning):
            return self.tensor(parameter)
        for row in self.code:
            if LAYERS[row[0]] == "embedding" and row[4] == learning and not row[7]:
                row[7] = 1
                return learning
        raise Unsupported("a parameter that several layers share has no compiled form")

    def emit(
        self,
        layer: str,
        value: int,
        shape: Shape,
        numbers: Sequence[int] = (),
        constants: tuple[float, float] = (0.0, 0.0),
        other: int = -1,
    ) -> int:
        """Appends a layer that reads ``value``; returns the number of its output, which has ``shape``."""
        if self.length > 1 and layer in ACROSS_SAMPLES:
            raise Unsupported(f"{layer} in a sequence has no compiled form")
        self.shapes.append(shape)
        output = len(self.shapes) - 1
        row = [LAYERS.index(layer), value, other, output, *numbers]
        row += [0] * (NUMBERS - len(row))
        self.code.append(row)
        self.constants.append(constants)
        return output

    def add(self, module: nn.Module, value: int) -> int:
        """Appends a module that reads ``value``; returns its output. Raises Unsupported."""
        require_plain(module)
        if type(module) is nn.Sequential:
            return self.add_all(module, value)
        write = WRITERS.get(type(module))
        if write is None:
            raise Unsupported(f"{type(module).__name__} has no compiled form")
        return write(self, module, value)

    def add_all(self, modules: Iterable[nn.Module], value: int) -> int:
        """Appends modules that follow one another; returns the output of the last.

        A ReLU right behind a norm becomes a part of the norm: nothing else can read the value between the two.
        """
        column = None  # of the norm before, which says whether a ReLU follows
        for module in modules:
            if column is not None and type(module) is nn.ReLU:
                self.code[-1][column] = 1
                column = None
                continue
            value = self.add(module, value)
            column = RELU_COLUMN.get(type(module))
        return value

    def plus(
        self,
        value: int,
        other: int,
        factor: float | tuple[Tensor, int] = 1.0,
    ) -> int:
        """Appends value + factor · other; the factor may be an element of a tensor, which each pass reads."""
        if isinstance(factor, tuple):
            tensor, element = factor
            return self.emit("add", value, self.shapes[value], [self.tensor(tensor), element], other=other)
        return self.emit("add", value, self.shapes[value], [-1], (factor, 0.0), other)

    def times(self, value: int, other: int) -> int:
        """Appends value · other; the other value may have one number for all channels, all positions or both."""
        return self.emit("multiply", value, self.shapes[value], other=other)

    def linear(
        self,
        value: int,
        outputs: int,
        weight: int,
        bias: int = -1,
    ) -> int:
        """Appends a linear layer with the tensors of these numbers."""
        return self.emit("linear", value, (outputs, 1, 1), [weight, bias])

    def attention(
        self,
        value: int,
        heads: int,
        width: int,
        causal: bool,
    ) -> int:
        """Appends attention of ``heads`` that are ``width`` wide; the value has their queries, keys and values."""
        numbers = [heads, width, self.length, int(causal)]
        return self.emit("attention", value, (heads * width, 1, 1), numbers)

    def activate(self, module: nn.Module, value: int) -> int:
        """Appends an activation, one of ``ACTIVATIONS``."""
        return _activation(self, module, value)

    def global_mean(self, value: int) -> int:
        """Appends the mean over all positions."""
        channels, height, width = self.shapes[value]
        return self.emit("average_pool", value, (channels, 1, 1), [height, width, height, width, 0, 0, 0])

    def detach(self, value: int) -> int:
        """Appends the same numbers, through which no gradient passes."""
        return self.emit("detach", value, self.shapes[value])

    def guard(
        self,
        value: int,
        flag: Tensor,
        of_gradients: bool,
        marks: bool,
    ) -> int:
        """Appends the same numbers, or zeros where the bool ``flag`` is False.

        Args:
            value: read by the guard.
            flag: as it is in the pass forward, also for the gradients; with ``of_gradients``, as it is when they come.
            of_gradients: whether the gradients are guarded, and not the numbers.
            marks: whether what is not finite clears the flag.
        """
        numbers = [self.tensor(flag), int(of_gradients), int(marks)]
        return self.emit("guard", value, self.shapes[value], numbers)

    def pass_through(self, features: int, delta: int) -> int:
        """Appends ``esper.core.blend.pass_through``."""
        return self.emit("pass_through", features, self.shapes[features], other=delta)

    @property
    def flops(self) -> int:
        """Operations of the convolutions and linear layers in a pass forward of one sample."""
        total = 0
        for layer, value, _, output, _, _, *kernel in self.code:
            if LAYERS[layer] == "convolution":
                inputs = self.shapes[value][0] // kernel[8]  # per group
                total += 2 * math.prod(self.shapes[output]) * inputs * kernel[0] * kernel[1]
            elif LAYERS[layer] == "linear":
                total += 2 * self.shapes[value][0] * self.shapes[output][0]
            elif LAYERS[layer] == "attention":  # scores and results, of half of all pairs of positions
                total += 2 * self.length * self.shapes[output][0]
        return total

    def program(self) -> Program:
        """Returns the finished program. Raises Unsupported for numbers other than all float32 or all float64."""
        dtypes = {tensor.dtype for tensor in self.tensors if tensor.is_floating_point()}
        if len(dtypes) > 1 or dtypes - {torch.float32, torch.float64}:
            names = ", ".join(sorted(map(str, dtypes)))
            raise Unsupported(f"a network of {names} has no compiled form")
        return Program(self)


def require_plain(module: nn.Module) -> None:
    """Raises Unsupported if a module does more than its class says: it has hooks, or a ``forward`` of its own."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    hooked = any(hook not in HARMLESS_HOOKS for hook in hooks)
    if hooked or module._backward_hooks or module._backward_pre_hooks or "forward" in vars(module):
        raise Unsupported(f"a {type(module).__name__} with hooks has no compiled form")


class Program:
    """A tape as the operator takes it.

    Attributes:
        tensors: those of the network.
        gradients: of the tensors that learn, in the layout of the tensors; each pass backward overwrites them.
        parameters: the tensors that learn, in the order of their gradients.
    """

    def __init__(self, tape: Tape) -> None:
        self.shapes = torch.tensor(tape.shapes, dtype=torch.int64)
        self.code = torch.tensor(tape.code, dtype=torch.int64).view(-1, NUMBERS)
        self.constants = torch.tensor(tape.constants, dtype=torch.float64).view(-1, 2)
        self.tensors = tape.tensors
        self.gradients: list[Tensor] = []
        self.parameters: list[Tensor] = []
        self.gradient_of: list[int] = []
        for tensor, learns in zip(tape.tensors, tape.learns, strict=True):
            self.gradient_of.append(len(self.gradients) if learns else -1)
            if learns:
                self.gradients.append(torch.zeros_like(tensor, requires_grad=False))
                self.parameters.append(tensor)
        self.ends = tape.ends or [len(tape.code)]
        self.output_shape = tape.shapes[-1]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The first arguments of all operators that run tapes."""
        return self.shapes, self.code, self.constants, self.tensors, self.gradients, self.gradient_of

    def run(
        self,
        x: Tensor,
        output_gradient: Tensor | None = None,
        input_gradient: Tensor | None = None,
        training: bool = True,
    ) -> Tensor:
        """Runs a batch forward, and backward if there is a gradient of the output.

        Args:
            x: inputs [B, ...] in the dtype of the network, float32 or float64.
            output_gradient: of the output, [B, C, H, W].
            input_gradient: is filled with the gradient of ``x``, in its shape.
            training: whether batch norms use the statistics of the batch, and update their own.

        Returns:
            the output [B, C, H, W].
        """
        output = x.new_empty((len(x), *self.output_shape))
        torch.ops.esper.tape_pass_(
            *self.arguments,
            x.detach().contiguous(),
            output,
            None if output_gradient is None else output_gradient.contiguous(),
            input_gradient,
            training,
        )
        return output


Writer = Callable[[Tape, Any, int], int]
WRITERS: dict[type[nn.Module], Writer] = {}
"""Functions that append a module of their type to a tape."""
RELU_COLUMN: dict[type[nn.Module], int] = {nn.BatchNorm1d: 10, nn.BatchNorm2d: 10, nn.GroupNorm: 7}
"""Column of a norm that says whether a ReLU follows."""


def writes(*types: type[nn.Module]) -> Callable[[Writer], Writer]:
    """Registers a function that appends modules of exactly these ``types`` to a tape."""

    def register(writer: Writer) -> Writer:
        WRITERS.update(dict.fromkeys(types, writer))
        return writer

    return register


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    first, second = value
    return first, second


@writes(nn.Conv2d)
def _convolution(tape: Tape, module: nn.Conv2d, value: int) -> int:
    kernel = _pair(module.kernel_size)
    stride = _pair(module.stride)
    dilation = _pair(module.dilation)
    if isinstance(module.padding, str) or module.padding_mode != "zeros":
        raise Unsupported("a Conv2d whose padding is not a number of zeros has no compiled form")
    if module.groups not in (1, module.in_channels) or (
        module.groups > 1 and module.out_channels != module.in_channels
    ):
        raise Unsupported("a Conv2d with groups of several channels has no compiled form")
    if math.prod(kernel) > MAX_TAPS:
        raise Unsupported(f"a Conv2d with more than {MAX_TAPS} weights a channel has no compiled form")
    padding = _pair(module.padding)
    sizes = []
    for axis, length in enumerate(tape.shapes[value][1:]):
        sizes.append((length + 2 * padding[axis] - dilation[axis] * (kernel[axis] - 1) - 1) // stride[axis] + 1)
    weight = tape.parameter(module.weight)
    bias = tape.parameter(module.bias)
    numbers = [weight, bias, *kernel, *stride, *padding, *dilation, module.groups]
    return tape.emit("convolution", value, (module.out_channels, sizes[0], sizes[1]), numbers)


@writes(nn.Linear)
def _linear(tape: Tape, module: nn.Linear, value: int) -> int:
    if tape.shapes[value][1:] != (1, 1):
        raise Unsupported("a Linear over positions has no compiled form")
    weight = tape.parameter(module.weight)
    return tape.linear(value, module.out_features, weight, tape.parameter(module.bias))


@writes(nn.BatchNorm1d, nn.BatchNorm2d)
def _batch_norm(tape: Tape, module: nn.BatchNorm2d, value: int) -> int:
    if tape.evaluates and module.running_mean is None:
        raise Unsupported("a norm that evaluates by the statistics of a batch has no compiled form")
    numbers = [
        tape.parameter(module.weight),
        tape.parameter(module.bias),
        tape.tensor(module.running_mean),
        tape.tensor(module.running_var),
        tape.tensor(module.num_batches_tracked),
        int(tape.evaluates or not module.training),
    ]
    momentum = math.nan if module.momentum is None else module.momentum
    return tape.emit("batch_norm", value, tape.shapes[value], numbers, (module.eps, momentum))


@writes(nn.GroupNorm)
def _group_norm(tape: Tape, module: nn.GroupNorm, value: int) -> int:
    numbers = [tape.parameter(module.weight), tape.parameter(module.bias), module.num_groups]
    return tape.emit("group_norm", value, tape.shapes[value], numbers, (module.eps, 0.0))


@writes(nn.LayerNorm)
def _layer_norm(tape: Tape, module: nn.LayerNorm, value: int) -> int:
    if (*module.normalized_shape, 1, 1) != tape.shapes[value]:
        raise Unsupported("a LayerNorm over positions has no compiled form")
    numbers = [tape.parameter(module.weight), tape.parameter(module.bias), 1]
    return tape.emit("group_norm", value, tape.shapes[value], numbers, (module.eps, 0.0))


@writes(*ACTIVATIONS)
def _activation(tape: Tape, module: nn.Module, value: int) -> int:
    kind = ACTIVATIONS[type(module)]
    slope = 0.0
    if isinstance(module, nn.GELU) and module.approximate == "tanh":
        kind += 1
    elif isinstance(module, nn.LeakyReLU):
        slope = module.negative_slope
    elif isinstance(module, nn.ELU):
        slope = module.alpha
    return tape.emit("activation", value, tape.shapes[value], [kind], (slope, 0.0))


@writes(nn.MaxPool2d, nn.AvgPool2d)
def _pool(tape: Tape, module: nn.MaxPool2d | nn.AvgPool2d, value: int) -> int:
    kernel = _pair(module.kernel_size)
    stride = _pair(module.stride)
    padding = _pair(module.padding)
    channels, *lengths = tape.shapes[value]
    sizes = []
    for axis, length in enumerate(lengths):
        room = length + 2 * padding[axis] - kernel[axis]
        windows = room // stride[axis] + 1
        # A window may stick out, but not begin in the padding behind the input.
        if module.ceil_mode and room % stride[axis] and windows * stride[axis] < length + padding[axis]:
            windows += 1
        sizes.append(windows)
    counts_padding = 0
    layer = "max_pool"
    if isinstance(module, nn.AvgPool2d):
        if module.divisor_override is not None:
            raise Unsupported("an AvgPool2d with divisor_override has no compiled form")
        layer = "average_pool"
        counts_padding = int(module.count_include_pad)
    elif module.return_indices or _pair(module.dilation) != (1, 1):
        raise Unsupported("a MaxPool2d with dilation or indices has no compiled form")
    numbers = [*kernel, *stride, *padding, counts_padding]
    return tape.emit(layer, value, (channels, sizes[0], sizes[1]), numbers)


@writes(nn.AdaptiveAvgPool2d)
def _global_mean(tape: Tape, module: nn.AdaptiveAvgPool2d, value: int) -> int:
    if module.output_size not in (1, (1, 1)):
        raise Unsupported("an AdaptiveAvgPool2d to several positions has no compiled form")
    return tape.global_mean(value)


@writes(nn.Flatten)
def _flatten(tape: Tape, module: nn.Flatten, value: int) -> int:
    if module.start_dim != 1 or module.end_dim not in (-1, 3):
        raise Unsupported("a Flatten of other than all features has no compiled form")
    channels, height, width = tape.shapes[value]
    if (height, width) == (1, 1):
        return value
    return tape.emit("flatten", value, (channels * height * width, 1, 1))


@writes(nn.Identity)
def _identity(tape: Tape, module: nn.Identity, value: int) -> int:
    return value


@writes(nn.Dropout, nn.Dropout1d, nn.Dropout2d)
def _dropout(tape: Tape, module: nn.Dropout, value: int) -> int:
    if module.p > 0 and module.training and not tape.evaluates:
        raise Unsupported("dropout has no compiled form")
    return value
