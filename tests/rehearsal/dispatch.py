"""A dispatch mode that lets torch launch every operator on the fake GPU, and queues the operator's CPU twin.

torch's own CUDA code runs: it allocates, picks streams, launches, waits and warns. Its kernels do nothing. The twin of
an operator is the same operator for the CPU on the same memory; it is put on the stream that torch launched on, and runs
when the fake runtime comes to it.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.rehearsal import fake_runtime
from tests.rehearsal.twins import NotModelledError, Philox, call_with_draws, memory_of, on_cpu

ONLY_MEMORY = {
    "_pin_memory",
    "empty",
    "empty_like",
    "empty_strided",
    "is_pinned",
    "new_empty",
    "new_empty_strided",
    "record_stream",
    "resize_",
    "set_",
}
"""Operators that write no values."""

SIZED_BY_VALUES = torch.Tag.dynamic_output_shape

failures: list[str] = []
"""What went wrong in twins, which run when nobody can be told; see :func:`take_failures`."""

_actions: dict[int, tuple[str, Callable[[], None]]] = {}
_numbers = itertools.count(1)


def take_failures() -> list[str]:
    """What was wrong since the last call, in twins and against CUDA's rules."""
    found = failures + fake_runtime.take_complaints()
    failures.clear()
    return found


def _run(number: int) -> None:
    name, action = _actions[number]
    try:
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            action()
    except BaseException as error:  # nothing may be raised into C
        failures.append(f"{name}: {type(error).__name__}: {error}")
        print(f"rehearsal: {failures[-1][:300]}", file=sys.stderr)


def _is_cuda(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == "cuda"


def _storages(leaves: list[Any]) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in leaves if _is_cuda(leaf)}


def current_stream(device: int) -> fake_runtime.Stream:
    """The stream that torch uses now on ``device``."""
    return int(torch._C._cuda_getCurrentRawStream(device))


class Operator:
    """One call of an operator with CUDA tensors, or that makes one.

    Args:
        func: the operator.
        args: its positional arguments.
        kwargs: its other arguments.
    """

    def __init__(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name = func._schema.name.split("::")[1]
        self.leaves, self.spec = tree_flatten((args, kwargs))
        tensors = [leaf.device.index for leaf in self.leaves if _is_cuda(leaf)]
        made = [leaf.index for leaf in self.leaves if isinstance(leaf, torch.device) and leaf.type == "cuda"]
        self.on_gpu = bool(tensors or made)
        self.has_inputs = bool(tensors)
        self.devices = set(tensors)
        places = [place for place in (*tensors, *made) if place is not None]
        self.device = places[0] if places else None
        """None stands for the current device."""

    def run(self) -> Any:
        """Let torch do its part, queue the twin, and return what the operator returns."""
        if self.device is None:
            self.device = torch.cuda.current_device()
        if self.name in ONLY_MEMORY or torch.Tag.inplace_view in self.func.tags:
            return self._launch()[0]
        if self._masks():
            return self._run_sized_by_values()
        sources = self._host_sources()
        draws = Philox.of(self.func, self.leaves, self.device, fake_runtime.is_capturing(current_stream(self.device)))
        known = _storages(self.leaves)
        out, stream = self._launch()
        outs = tree_flatten(out)[0]
        if draws is not None and not draws.moved:
            draws = None
        if self._writes_nothing(outs, known):
            return out
        work = self._twin(sources, draws)
        if self._host_waits(outs):
            return self._finish_now(work, out, outs, stream)
        targets = [self._target(leaf, known) for leaf in outs]
        self._submit(lambda: _store(work(), targets), stream, [leaf for leaf in outs if _is_cuda(leaf)])
        return out

    def _launch(self) -> tuple[Any, fake_runtime.Stream]:
        """What torch returns, and the stream that it used."""
        assert self.device is not None
        fake_runtime.begin_operator()
        try:
            out = self.func(*self.args, **self.kwargs)
        finally:
            count, stream = fake_runtime.end_operator()
        if count > 1 and len(self.devices) < 2:
            failures.append(f"{self.func} used {count} streams at once")
        return out, stream if count else current_stream(self.device)

    def _host_sources(self) -> list[Any]:
        """The leaves, with copies of what lies in pageable memory: CUDA reads that before the call returns."""
        written = self.leaves[0] if self.name == "copy_" else None

        def read(leaf: Any) -> Any:
            late = not isinstance(leaf, Tensor) or _is_cuda(leaf) or leaf is written
            return leaf if late or fake_runtime.is_pinned(leaf.data_ptr()) else leaf.clone()

        return [read(leaf) for leaf in self.leaves]

    def _writes_nothing(self, outs: list[Any], known: set[int]) -> bool:
        """Whether the operator only looks at what was there: a view, or a property."""
        if self.func._schema.is_mutable:
            return False
        tensors = [leaf for leaf in outs if isinstance(leaf, Tensor)]
        if not tensors:
            return not outs
        if any(leaf.device.type != "cuda" for leaf in tensors):
            return not self.has_inputs  # made for the CPU, as with a device argument of is_pinned
        return all(leaf.numel() == 0 or leaf.untyped_storage().data_ptr() in known for leaf in tensors)

    def _twin(self, sources: list[Any], draws: Philox | None) -> Callable[[], list[Any]]:
        cpu = torch.device("cpu")
        leaves = [on_cpu(leaf) if _is_cuda(leaf) else cpu if isinstance(leaf, torch.device) else leaf for leaf in sources]
        if draws is None:
            leaves = [None if isinstance(leaf, torch.Generator) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)

        def work() -> list[Any]:
            if draws is not None:
                return tree_flatten(call_with_draws(self.func, args, kwargs, draws))[0]
            return tree_flatten(self.func(*args, **kwargs))[0]

        return work

    def _target(self, leaf: Any, known: set[int]) -> Tensor | None:
        """Where a result of the twin goes; None if the twin writes to its arguments."""
        if not isinstance(leaf, Tensor) or leaf.numel() == 0:
            return None
        if not _is_cuda(leaf):
            return leaf  # in pinned memory
        return None if leaf.untyped_storage().data_ptr() in known else on_cpu(leaf)

    def _host_waits(self, outs: list[Any]) -> bool:
        """Whether the call returns values to the CPU, so that torch has waited for the stream."""
        if not self.has_inputs:
            return False
        host = [leaf for leaf in outs if isinstance(leaf, Tensor) and not _is_cuda(leaf)]
        values = [leaf for leaf in outs if leaf is not None and not isinstance(leaf, Tensor)]
        late = self._given("non_blocking") and all(fake_runtime.is_pinned(leaf.data_ptr()) for leaf in host)
        return bool(values) or (bool(host) and not late)

    def _given(self, name: str) -> Any:
        """The argument of this name, None if it was not given."""
        names = [argument.name for argument in self.func._schema.arguments]
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}.get(name)

    def _finish_now(
        self, work: Callable[[], list[Any]], out: Any, outs: list[Any], stream: fake_runtime.Stream
    ) -> Any:
        with torch.cuda.device(self.device):
            fake_runtime.drain(stream)
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            results = work()
            for leaf, result in zip(outs, results, strict=True):
                if isinstance(leaf, Tensor) and leaf is not result:
                    leaf.copy_(result)
        return out if any(isinstance(leaf, Tensor) for leaf in outs) else results[0]

    def _masks(self) -> bool:
        """Whether the size of the result, or of a step on the way, depends on values."""
        if self.name.startswith(("index", "_index_put_impl", "_unsafe_index")):
            return any(leaf.dtype in (torch.bool, torch.uint8) for leaf in self.leaves[1:] if isinstance(leaf, Tensor))
        return SIZED_BY_VALUES in self.func.tags

    def _run_sized_by_values(self) -> Any:
        """torch waits for the stream to learn the size. Its own code would read it from a kernel that did nothing."""
        assert self.device is not None
        with torch.cuda.device(self.device):
            wait = Operator(torch.ops.aten._local_scalar_dense.default, (torch.empty(1, device="cuda"),), {})
            wait.run()  # by torch's rules: an error in a capture, a warning or an error in sync debug mode
            stream = current_stream(self.device)
            fake_runtime.drain(stream)
            with _disable_current_modes(), torch.no_grad():
                results = self._twin(self.leaves, None)()
            if self.func._schema.is_mutable:
                return self.args[0]
            made = [torch.empty(r.shape, dtype=r.dtype, device=f"cuda:{self.device}") for r in results]
        targets = [on_cpu(leaf) for leaf in made]
        self._submit(lambda: _store(results, targets), stream, made)
        return made[0] if len(made) == 1 else tuple(made)

    def _submit(self, action: Callable[[], None], stream: fake_runtime.Stream, outs: list[Tensor]) -> None:
        """Put the action on the stream. Copies between devices go on that of the source, and the other one waits."""
        tensors = [leaf for leaf in (*self.leaves, *outs) if _is_cuda(leaf)]
        across = len({tensor.device.index for tensor in tensors}) > 1
        memory = memory_of(tensors, None if across else self.device)

        def checked() -> None:
            for part in memory:
                part.check()
            action()

        number = next(_numbers)
        _actions[number] = (str(self.func), checked)
        with torch.cuda.device(self.device):
            code = fake_runtime.submit(stream, number)
            if across:
                _let_wait(stream, tensors)
        if code != 0:
            raise RuntimeError(f"CUDA error {code} when {self.func} was put on its stream")
        for done in fake_runtime.take_released():
            del _actions[done]


def _let_wait(stream: fake_runtime.Stream, tensors: list[Tensor]) -> None:
    for device in {tensor.device.index for tensor in tensors}:
        with torch.cuda.device(device):
            if current_stream(device) != stream:
                fake_runtime.order(stream, current_stream(device))


def _store(results: list[Any], targets: list[Tensor | None]) -> None:
    for target, result in zip(targets, results, strict=False):
        if target is not None:
            target.copy_(result)


class Rehearsal(TorchDispatchMode):
    """Every operator with CUDA tensors goes through :class:`Operator`. Holds for the thread that enters it."""

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operator = Operator(func, args, kwargs or {})
        return operator.run() if operator.on_gpu else func(*args, **(kwargs or {}))


def _in_every_thread() -> None:
    inner = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def bootstrap(thread: threading.Thread) -> None:
        with Rehearsal():
            inner(thread)

    threading.Thread._bootstrap_inner = bootstrap  # type: ignore[attr-defined]


def start(seed: int) -> None:
    """Rehearse from here on, in this thread and in all that begin later; ``seed`` decides how streams interleave."""
    fake_runtime.set_callback(_run)
    fake_runtime.seed(seed)
    torch.backends.cudnn.enabled = False  # there is no fake cuDNN; torch has kernels of its own for everything
    _in_every_thread()
    Rehearsal().__enter__()


__all__ = ["NotModelledError", "Operator", "Rehearsal", "start", "take_failures"]
