"""A dispatch mode that lets torch launch every operator on the fake GPU, and queues the operator's CPU twin.

torch's own CUDA code runs: it allocates, picks streams, launches, waits and warns. Its kernels do nothing. The twin of
an operator is the same operator for the CPU on the same memory. It is put on the stream that torch launched on, and it
runs when the fake runtime comes to it.
"""

from __future__ import annotations

import gc
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.rehearsal import fake_runtime
from tests.rehearsal.twins import (
    NotModelledError,
    Philox,
    addresses_of,
    call_with_draws,
    on_cpu,
)

LAUNCHES_NOTHING = {
    *(
        "alias",
        "as_strided",
        "detach",
        "expand",
        "lift_fresh",
        "permute",
        "record_stream",
        "select",
        "set_",
        "slice",
    ),
    *(
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unsqueeze",
        "view",
        "_reshape_alias",
    ),
}
"""Views, and operators that change no memory."""

ONLY_ALLOCATES = {
    *(
        "_pin_memory",
        "empty",
        "empty_like",
        "empty_strided",
        "is_pinned",
        "new_empty",
        "new_empty_strided",
        "resize_",
    ),
}
"""Operators that write nothing, but for the NaNs of torch's deterministic mode, which the rehearsal leaves out."""

CPU = torch.device("cpu")

failures: list[str] = []
"""Failures in twins, which run where no error can be raised; see :func:`take_failures`."""

_actions: dict[int, tuple[str, Callable[[], None]]] = {}
_numbers = itertools.count(1)


def take_failures() -> list[str]:
    """Returns failures since the last call, of twins and of CUDA's rules."""
    found = failures + fake_runtime.take_complaints()
    failures.clear()
    return found


def _report(failure: str) -> None:
    failures.append(failure)
    print(f"rehearsal: {failure[:300]}", file=sys.stderr)


def _run(number: int) -> None:
    name, action = _actions[number]
    try:
        with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd():
            action()
    except BaseException as error:  # nothing may be raised into C
        _report(f"{name}: {type(error).__name__}: {error}")


@dataclass(frozen=True)
class Traits:
    """Facts from the schema and the tags of an operator."""

    name: str
    mutable: bool
    draws: bool
    drops: bool
    launches: bool
    allocates: bool
    sized_by_values: bool

    @classmethod
    @cache
    def of(cls, func: torch._ops.OpOverload) -> Traits:
        name, tags = func._schema.name.split("::")[1], func.tags
        return cls(
            name,
            func._schema.is_mutable,
            torch.Tag.nondeterministic_seeded in tags,
            any(argument.name == "dropout_p" for argument in func._schema.arguments),
            name not in LAUNCHES_NOTHING and torch.Tag.inplace_view not in tags,
            name in ONLY_ALLOCATES,
            torch.Tag.dynamic_output_shape in tags
            or name.startswith(("index_put", "_index_put_impl")),
        )


def _leaves(arguments: Any) -> Iterator[Any]:
    for value in arguments:
        if isinstance(value, tuple | list):
            yield from _leaves(value)
        else:
            yield value


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with every leaf of its tuples and lists changed."""
    if isinstance(value, tuple | list):
        return type(value)(_mapped(change, part) for part in value)
    return change(value)


def _is_cuda(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_cuda


def _storages(leaves: list[Any]) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in leaves if _is_cuda(leaf)}


def current_stream(device: int) -> fake_runtime.Place:
    """The stream that torch uses now on ``device``. Asked for on another device, it would make a context there."""
    if torch._C._cuda_getDevice() == device:
        return device, int(torch._C._cuda_getCurrentRawStream(device))
    with torch.cuda.device(device):
        return device, int(torch._C._cuda_getCurrentRawStream(device))


class Operator:
    """One call of an operator with CUDA tensors, or that makes one.

    Args:
        func: the operator.
        args: its positional arguments.
        kwargs: its other arguments.
        leaves: all of these, without the tuples and lists that they are in.
    """

    def __init__(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Any],
    ) -> None:
        self.func, self.args, self.kwargs, self.leaves = func, args, kwargs, leaves
        self.traits = Traits.of(func)
        self.inputs = [leaf for leaf in leaves if _is_cuda(leaf)]
        places = [leaf.device.index for leaf in self.inputs]
        places += [
            leaf.index
            for leaf in leaves
            if isinstance(leaf, torch.device) and leaf.index is not None
        ]
        self.device: int = places[0] if places else torch.cuda.current_device()
        self.across = len({leaf.device.index for leaf in self.inputs}) > 1

    def run(self) -> Any:
        """Let torch do its part, queue the twin, and return what the operator returns."""
        if self.traits.allocates:
            return self._launch()[0]
        if self.traits.sized_by_values and self._needs_size():
            return self._run_sized_by_values()
        args, kwargs = self._host_sources()
        draws = self._draws()
        known = _storages(self.leaves)
        out, place = self._launch()
        outs = list(_leaves(out if isinstance(out, tuple | list) else (out,)))
        if self._writes_nothing(outs, known):
            return out
        work = self._twin(
            args, kwargs, draws if draws is not None and draws.moved else None
        )
        if self._host_waits(outs):
            return self._finish_now(work, out, outs, place)
        targets = [self._target(leaf, known) for leaf in outs]
        self._submit(lambda: _store(work(), targets), place, outs)
        return out

    def _launch(self) -> tuple[Any, fake_runtime.Place]:
        """Launches the operator; returns torch's result and the stream that it used."""
        fake_runtime.begin_operator()
        try:
            out = self.func(*self.args, **self.kwargs)
        finally:
            count, handle = fake_runtime.end_operator()
        if count > 1 and not self.across:
            _report(f"{self.func} used {count} streams at once")
        return out, (self.device, handle) if count else current_stream(self.device)

    def _host_sources(self) -> tuple[Any, Any]:
        """The arguments, with copies of what lies in pageable memory: CUDA reads that before the call returns."""
        if len(self.inputs) == len(
            [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        ):
            return self.args, self.kwargs
        written = self.leaves[0] if self.traits.name == "copy_" else None

        def read(leaf: Any) -> Any:
            late = not isinstance(leaf, Tensor) or leaf.is_cuda or leaf is written
            return (
                leaf
                if late or fake_runtime.is_pinned(leaf.data_ptr())
                else leaf.clone()
            )

        return _mapped(read, self.args), {
            name: _mapped(read, value) for name, value in self.kwargs.items()
        }

    def _draws(self) -> Philox | None:
        """The generator that the operator draws from, if it draws. Raises NotModelledError in a capture."""
        if not self.traits.draws or (
            self.traits.drops and not self._given("dropout_p")
        ):
            return None
        if fake_runtime.is_capturing(current_stream(self.device)):
            _report(f"{self.func} draws in a capture, which is not modelled")
            raise NotModelledError(f"{self.func} draws in a capture")
        return Philox.of(self.leaves, self.device)

    def _writes_nothing(self, outs: list[Any], known: set[int]) -> bool:
        """Whether the operator wrote nothing: a view, or a property."""
        if self.traits.mutable:
            return False
        tensors = [leaf for leaf in outs if isinstance(leaf, Tensor)]
        if any(not leaf.is_cuda for leaf in tensors):
            return not self.inputs  # made for the CPU
        return bool(tensors) and all(
            leaf.numel() == 0 or leaf.untyped_storage().data_ptr() in known
            for leaf in tensors
        )

    def _twin(
        self, args: Any, kwargs: Any, draws: Philox | None
    ) -> Callable[[], list[Any]]:
        def change(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return on_cpu(leaf) if leaf.is_cuda else leaf
            if isinstance(leaf, torch.device):
                return CPU
            return None if isinstance(leaf, torch.Generator) else leaf

        with torch._C._AutoDispatchBelowAutograd():
            args, kwargs = (
                _mapped(change, args),
                {name: _mapped(change, value) for name, value in kwargs.items()},
            )
        func = self.func

        def work() -> list[Any]:
            found = (
                func(*args, **kwargs)
                if draws is None
                else call_with_draws(func, args, kwargs, draws)
            )
            return list(_leaves(found if isinstance(found, tuple | list) else (found,)))

        return work

    def _target(self, leaf: Any, known: set[int]) -> Tensor | None:
        """The destination of a twin's result; None if the twin writes to its arguments."""
        if not isinstance(leaf, Tensor) or leaf.numel() == 0:
            return None
        if not leaf.is_cuda:
            return leaf  # in pinned memory
        return None if leaf.untyped_storage().data_ptr() in known else on_cpu(leaf)

    def _host_waits(self, outs: list[Any]) -> bool:
        """Whether the call returns values to the CPU, so that torch has waited for the stream."""
        if not self.inputs:
            return False
        host = [leaf for leaf in outs if isinstance(leaf, Tensor) and not leaf.is_cuda]
        values = [
            leaf for leaf in outs if leaf is not None and not isinstance(leaf, Tensor)
        ]
        if host and not values and self._given("non_blocking"):
            return not all(fake_runtime.is_pinned(leaf.data_ptr()) for leaf in host)
        return bool(values or host)

    def _given(self, name: str) -> Any:
        """The argument of this name, None if it was not given."""
        names = [argument.name for argument in self.func._schema.arguments]
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}.get(name)

    def _finish_now(
        self,
        work: Callable[[], list[Any]],
        out: Any,
        outs: list[Any],
        place: fake_runtime.Place,
    ) -> Any:
        fake_runtime.drain(place)
        with torch._C._AutoDispatchBelowAutograd():
            results = work()
            for leaf, result in zip(outs, results, strict=True):
                if isinstance(leaf, Tensor) and leaf is not result:
                    leaf.copy_(result)
        return out if any(isinstance(leaf, Tensor) for leaf in outs) else results[0]

    def _needs_size(self) -> bool:
        """Whether torch would wait to learn a size: with an index, only if it is a mask."""
        if "index" not in self.traits.name:
            return True
        return any(
            leaf.dtype in (torch.bool, torch.uint8)
            for leaf in self.leaves[1:]
            if isinstance(leaf, Tensor)
        )

    def _run_sized_by_values(self) -> Any:
        """torch waits for the stream to learn the size. Its own code would read it from a kernel that did nothing."""
        with torch.cuda.device(self.device):
            probe = torch.empty(1, device="cuda")
            # By torch's rules: an error in a capture, a warning or an error in sync debug mode.
            Operator(
                torch.ops.aten._local_scalar_dense.default, (probe,), {}, [probe]
            ).run()
            place = current_stream(self.device)
            fake_runtime.drain(place)
            with torch._C._AutoDispatchBelowAutograd():
                results = self._twin(self.args, self.kwargs, None)()
            if self.traits.mutable:
                return self.args[0]
            made = [torch.empty(r.shape, dtype=r.dtype, device="cuda") for r in results]
        targets = [on_cpu(leaf) for leaf in made]
        self._submit(lambda: _store(results, targets), place, made)
        return made[0] if len(made) == 1 else tuple(made)

    def _submit(
        self, action: Callable[[], None], place: fake_runtime.Place, outs: list[Any]
    ) -> None:
        """Put the action on the stream. Copies between devices go on that of the source, and the other one waits."""
        tensors = [leaf for leaf in (*self.inputs, *outs) if _is_cuda(leaf)]
        devices = {leaf.device.index for leaf in tensors}
        number = next(_numbers)
        _actions[number] = (str(self.func), action)
        code = fake_runtime.submit(
            place, number, addresses_of(tensors), len(devices) > 1
        )
        for device in devices - {place[0]}:
            fake_runtime.order(place, current_stream(device))
        if code != 0:
            raise RuntimeError(
                f"CUDA error {code} when {self.func} was put on its stream"
            )
        for done in fake_runtime.take_released():
            del _actions[done]


def _store(results: list[Any], targets: list[Tensor | None]) -> None:
    for target, result in zip(targets, results, strict=False):
        # In eval mode, batch norm of the CPU returns no statistics, and those of CUDA are not read.
        if target is not None and result.numel() > 0:
            target.copy_(result)


class Rehearsal(TorchDispatchMode):
    """Every operator with CUDA tensors goes through :class:`Operator`. Holds for the thread that enters it."""

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not Traits.of(func).launches:
            return func(*args, **kwargs)
        leaves = [*_leaves(args), *_leaves(kwargs.values())]
        for leaf in leaves:
            if _is_cuda(leaf) or (
                isinstance(leaf, torch.device) and leaf.type == "cuda"
            ):
                return Operator(func, args, kwargs, leaves).run()
        return func(*args, **kwargs)


def _in_every_thread() -> None:
    inner = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def bootstrap(thread: threading.Thread) -> None:
        with Rehearsal():
            inner(thread)

    threading.Thread._bootstrap_inner = bootstrap  # type: ignore[attr-defined]


def _show_by_value() -> None:
    """Printing a tensor goes past every mode; so it is given one of the CPU."""
    inner = torch._tensor_str._str

    def show(tensor: Tensor, **options: Any) -> str:
        return inner(tensor.detach().cpu() if _is_cuda(tensor) else tensor, **options)

    torch._tensor_str._str = show


def start(seed: int) -> None:
    """Rehearse from here on, in this thread and in all that begin later; ``seed`` decides how streams interleave."""
    fake_runtime.set_callback(_run)
    fake_runtime.seed(seed)
    torch.backends.cudnn.enabled = (
        False  # there is no fake cuDNN; torch has kernels of its own for everything
    )
    _in_every_thread()
    _show_by_value()
    gc.freeze()  # modules do not become garbage, and twins make the collector look often
    gc.set_threshold(20000, 20, 20)
    Rehearsal().__enter__()
