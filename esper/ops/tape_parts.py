"""Parts of tapes: the layers of a module, which the next tape with the same module copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from esper.ops.tape import LAYERS, TENSORS, Shape, Tape, require_plain

FIRST_NUMBER = 4
"""Column of the first number of a layer."""

Owner = tuple[Mapping[str, Tensor | None], str]
"""The parameters or the buffers of a module, by name, and the name of a tensor of them."""

Kind = tuple[Shape, int, bool]
"""The shape of the input, the length of sequences, and whether the module evaluates."""


@dataclass(frozen=True)
class _Layer:
    """A layer of a part."""

    row: list[int]
    """With values counted from the input of the part, which is 0, and without its tensors."""
    shape: Shape
    constants: tuple[float, float]
    tensors: list[tuple[Owner, bool] | None]
    """Where its tensors are found, and whether they are parameters; a module may get other buffers for a while."""


@dataclass(frozen=True)
class _Part:
    """The layers that a module has written."""

    children: list[nn.Module]
    """All modules within it when it did."""
    layers: list[_Layer] | None
    """None: it cannot be copied."""


class Parts:
    """The parts that the modules of a network have written so far.

    A module is taken to keep its settings, such as strides. Tensors, submodules and hooks may change: a part is written
    again if submodules are others.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[nn.Module, dict[Kind, _Part]] = WeakKeyDictionary()

    def write(
        self,
        tape: Tape,
        module: nn.Module,
        value: int,
    ) -> int:
        """Appends a module that reads ``value``, as ``tape.add`` does; returns its output. Raises Unsupported."""
        parts = self._known.setdefault(module, {})
        key = (tape.shapes[value], tape.length, tape.evaluates)
        require_plain(module)
        _, *children = module.modules()
        for child in children:
            require_plain(child)
        part = parts.get(key)
        if part is None or part.children != children:
            part = _Part(children, _layers_of(module, *key))
            parts[key] = part
        if part.layers is None:
            return tape.add(module, value)
        places = [value]
        for layer in part.layers:
            row = layer.row.copy()
            row[1] = places[row[1]]
            if row[2] >= 0:
                row[2] = places[row[2]]
            places.append(len(tape.shapes))
            row[3] = places[-1]
            for column, found in enumerate(layer.tensors, FIRST_NUMBER):
                if found is None:
                    continue
                (tensors, name), learns = found
                tensor = tensors[name]
                row[column] = tape.parameter(tensor) if learns else tape.tensor(tensor)
            tape.shapes.append(layer.shape)
            tape.code.append(row)
            tape.constants.append(layer.constants)
        return places[-1]


def _layers_of(
    module: nn.Module,
    shape: Shape,
    length: int,
    evaluates: bool,
) -> list[_Layer] | None:
    """Returns the layers of a module; None if its last layer is not its output, or a tensor is not its own.

    Raises Unsupported.
    """
    scratch = Tape(shape, length)
    scratch.evaluates = evaluates
    if evaluates:
        scratch.learning = ()
    output = scratch.add(module, 0)
    if output != len(scratch.code):
        return None

    owners: dict[int, tuple[Owner, bool]] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            owners[id(parameter)] = ((child._parameters, name), True)
        for name, buffer in child._buffers.items():
            owners[id(buffer)] = ((child._buffers, name), False)
    layers = []
    for row, layer_shape, constants in zip(scratch.code, scratch.shapes[1:], scratch.constants, strict=True):
        tensors: list[tuple[Owner, bool] | None] = []
        count = TENSORS[LAYERS[row[0]]]
        for number in row[FIRST_NUMBER : FIRST_NUMBER + count]:
            if number < 0:
                tensors.append(None)
                continue
            found = owners.get(id(scratch.tensors[number]))
            if found is None:
                return None
            tensors.append(found)
        layers.append(_Layer(row, layer_shape, constants, tensors))
    return layers
