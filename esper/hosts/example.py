"""Running a network on an example, without a trace in the network."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from esper.config import ConfigError
from esper.hosts.compare import tensors_in
from esper.hosts.host import kept_modes


def as_it_is(output: object) -> object:
    return output


def outputs_of(
    network: nn.Module,
    example: Any,
    read: Callable[[object], object] = as_it_is,
    training: bool = False,
) -> list[Tensor]:
    """Returns the tensors that ``network`` returns for ``example``, each time with equal random numbers.

    It runs in eval mode if it is not ``training``, and is as before afterwards, with its modes, buffers and attributes.
    Products of float32 have the precision of float32, whatever is set for training, so that outputs can be compared.
    """
    return outputs_for(network, *arguments_of(example), read, training)


def outputs_for(
    network: nn.Module,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    read: Callable[[object], object] = as_it_is,
    training: bool = False,
) -> list[Tensor]:
    """As :func:`outputs_of`, for arguments that the network may overwrite."""
    devices = set()
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.device.type == "cuda":
            devices.add(tensor.device)
    gpus = sorted(devices, key=str)
    try:
        with (
            torch.no_grad(),
            kept_state(network),
            kept_modes(network),
            torch.random.fork_rng(devices=gpus),
            full_products(),
        ):
            torch.default_generator.manual_seed(0)
            for gpu in gpus:
                torch.cuda.default_generators[gpu.index].manual_seed(0)
            network.train(training)
            output = read(network(*arguments, **keywords))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the network cannot run on the example: {type(error).__name__}: {error} (a dict holds arguments by name, "
            "and a tuple those by position; put a single argument that is one of these in a tuple)"
        ) from error
    found = list(tensors_in(output))
    if not found:
        raise ConfigError(f"the network returns {type(output).__name__} for the example, in which there is no tensor")
    return found


@contextmanager
def full_products() -> Iterator[None]:
    """Within it, float32 products are computed in float32, and not in TF32 or bfloat16, as may be set for training.

    https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
    """
    backends: Any = torch.backends
    settings = [
        backends.cuda.matmul,
        backends.cudnn.conv,
        backends.cudnn.rnn,
        backends.mkldnn.matmul,
        backends.mkldnn.conv,
        backends.mkldnn.rnn,
    ]
    before = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision


def arguments_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns copies of the arguments by position and by name: the network may overwrite its inputs.

    A named tuple, such as a packed sequence, is a single argument.
    """
    copied = cloned(example)
    if isinstance(copied, Mapping):
        return (), dict(copied)
    if isinstance(copied, tuple) and not hasattr(copied, "_fields"):
        return copied, {}
    return (copied,), {}


def cloned(values: Any) -> Any:
    """Returns a deep copy of nested values with copies of their tensors."""
    # Tensors are cloned: deepcopy takes no part of a graph, and copies all of the data that a tensor is a part of.
    memo = {id(tensor): tensor.detach().clone() for tensor in tensors_in(values)}
    return copy.deepcopy(values, memo)


@contextmanager
def kept_state(network: nn.Module) -> Iterator[None]:
    """Restores buffers and attributes of every module: a pass may count its calls, or keep a state for the next."""
    modules = [(module, dict(vars(module)), dict(module._buffers)) for module in network.modules()]
    values = []
    for buffer in network.buffers():
        if buffer.is_inference():
            continue
        values.append((buffer, buffer._version, buffer.detach().clone()))
    try:
        yield
    finally:
        for module, attributes, buffers in modules:
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
        for buffer, version, value in values:
            if buffer._version != version:  # the others may be expanded, which cannot be written to
                buffer.copy_(value)
