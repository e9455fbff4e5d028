"""The compiled tier: segments of hosts are compiled with ``torch.compile``; seeds and sites are not.

One compiled function serves the segments of all hosts, so that they share compiled code. It has several variants per
segment, by mode, gradients, number format and number of threads. All variants of a run are compiled before its first
step, because compiling in one thread changes how modules are called in all others.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from esper.core.place import Features
from esper.data.split import Split
from esper.hosts.graft import GraftedHost
from esper.hosts.host import Host, Run, SegmentedHost, kept_modes, run_segment
from esper.ops import _native
from esper.training.executor import Executor
from esper.training.host_training import HostTraining
from esper.training.rng import has_dropout, seeded
from esper.training.shadow import ShadowBuffers

BACKEND = "inductor"
"""Backend of torch.compile, which generates C++ for a CPU and Triton for a GPU."""

MAX_VARIANTS = 200
"""Max variants of all segments in the process, which torch keeps in one list; torch's own limit is 8."""

MAX_REASON = 300
"""Max characters of a reason; torch's messages about failed compilations fill pages."""


class CompiledRun:
    """``run_segment``, compiled without graph breaks; several threads may call it at the same time.

    Compiled code covers ranges of batch sizes. A batch size of 1 has its own code, and on a CPU sizes below 16 too,
    for which convolutions differ.

    Dynamo's guard evaluation is not thread-safe: evaluated by two threads at once, guards give wrong results. It is
    serialised by a lock; execution of compiled code is not.
    """

    def __init__(self, backend: str) -> None:
        from torch._dynamo import lookup_backend  # takes a second to import

        self._guards = threading.Lock()
        self._compile_graph = lookup_backend(backend)
        options: dict[str, Any] = {
            "fullgraph": True,
            "dynamic": True,
            "backend": self._graph,
        }
        if "recompile_limit" in inspect.signature(torch.compile).parameters:
            options["recompile_limit"] = MAX_VARIANTS
        else:  # torch before 2.13: one limit for the whole process
            limit = getattr(torch.compiler.config, "recompile_limit", MAX_VARIANTS)
            torch.compiler.config.recompile_limit = max(limit, MAX_VARIANTS)
        self._run: Run = torch.compile(run_segment, **options)

    def __call__(self, segment: nn.Module, h: Tensor) -> Tensor:
        with self._guards:
            return self._run(segment, h)

    def _graph(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """Compiles a graph with the backend and returns a callable that releases the lock during execution."""
        compiled = self._compile_graph(graph, inputs)

        def unlocked(*arguments: Any) -> Any:
            self._guards.release()
            try:
                return compiled(*arguments)
            finally:
                self._guards.acquire()

        return unlocked


@cache
def compiled_run(backend: str) -> CompiledRun:
    """Returns the process's only instance per backend, so that all hosts share compiled code."""
    return CompiledRun(backend)


def compile_obstacle(host: Host, draws: bool = False) -> str | None:
    """Returns the reason why ``host`` cannot be compiled, or None if it can be tried.

    ``draws`` is whether it draws from the process's random generators.
    """
    if isinstance(host, GraftedHost):
        return "a grafted model is intercepted at its sites by hooks, and has no separate segments to compile"
    if not isinstance(host, SegmentedHost):
        return f"{type(host).__name__} is not a SegmentedHost, and has no separate segments to compile"
    if draws or has_dropout(host):
        return "the host draws random numbers, and would draw different ones in compiled code"
    return None


def compile_host(
    host: Host,
    trained: Sequence[Tensor],
    evaluated: Sequence[Tensor] = (),
    casting: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> str | None:
    """Compiles the segments of ``host`` and tries them; its weights, buffers, gradients and mode do not change.

    Args:
        host: the host, in any mode.
        trained: inputs [B, ...] for a forward and a backward pass in train mode, one for each batch size of the run.
        evaluated: inputs [B, ...] for a forward pass in eval mode, likewise.
        casting: makes the context that sets the number format of passes.

    Returns None, or the reason why the host was not compiled.
    """
    reason = compile_obstacle(host)
    if reason is not None:
        return reason
    assert isinstance(host, SegmentedHost)

    before = host.compiled
    run = compiled_run(BACKEND)
    left_out = {step.module for step in host.steps}  # those that no pass has run yet

    def noting(segment: nn.Module, h: Tensor) -> Tensor:
        left_out.discard(segment)
        return run(segment, h)

    host.compiled = noting
    try:
        with kept_modes(host), seeded(0), ShadowBuffers(host).in_place():
            _rehearse(host, trained, evaluated, casting)
    except Exception as error:  # the network or the compiler may raise anything
        host.compiled = before
        return _reason_of(error)
    if left_out:
        host.compiled = before
        return f"{type(host).__name__} has its own forward pass, which does not call run() for every step"
    host.compiled = run
    return None


def compile_hosts(hosts: Sequence[HostTraining], executor: Executor) -> str | None:
    """Compiles ``hosts``, all of one task and before their first episode, or returns why none of them is compiled.

    Compiled code depends on the device and the number of threads, so one host of each device is compiled on a worker.

    Raises RuntimeError if they cannot be compiled and ``ESPER_REQUIRE_NATIVE`` is 1.
    """
    first_of_device = {training.device: training for training in reversed(hosts)}
    reason = None
    for first in first_of_device.values():
        reason = _compile_on_worker(first, executor)
        if reason is not None:
            break

    for training in hosts:
        if isinstance(training.host, SegmentedHost):
            training.host.compiled = compiled_run(BACKEND) if reason is None else None
    if reason is not None:
        _native.refuse_fallback("hosts are not compiled", reason)
    return reason


def _compile_on_worker(training: HostTraining, executor: Executor) -> str | None:
    reason = compile_obstacle(training.host, training.host_draws_globally)
    if reason is not None:
        return reason
    reasons: list[str | None] = []
    executor.run(lambda host: reasons.append(_compile_for_run(host)), [training])
    (reason,) = reasons
    if reason is not None:
        return reason
    # New seeds are probed between epochs, possibly with more threads.
    return compile_host(training.host, (), [training.sample])


def _compile_for_run(training: HostTraining) -> str | None:
    """Compiles a host for the inputs of its training and validation passes; returns why not, or None."""
    task = training.task
    dtype = training.arithmetic.image_dtype
    trained = []
    batch = torch.arange(training.config.task.batch_size)
    for size in set(map(len, batch.tensor_split(training.config.task.micro_batches))):
        if isinstance(task.train, Split):
            trained.append(task.train.inputs(0, size, dtype))
        else:
            trained.append(task.calibration_inputs(size))
    evaluated: list[Tensor] = []
    for split in (task.validation, task.test):
        most = task.evaluation_batch
        sizes = {min(most, len(split) - start) for start in range(0, len(split), most)}
        evaluated.extend(split.inputs(0, size, dtype) for size in sizes)

    return compile_host(training.host, trained, evaluated, training.arithmetic.casting)


def _rehearse(
    host: SegmentedHost,
    trained: Iterable[Tensor],
    evaluated: Iterable[Tensor],
    casting: Callable[[], AbstractContextManager[object]],
) -> None:
    """Runs every kind of pass that occurs in a run.

    In training, features at sites have a gradient to the host's weights, or are the start of an incubating seed's pass.
    """
    host.train()
    parameters = [parameter for parameter in host.parameters() if parameter.requires_grad]
    for x in trained:
        for detached in (False, True):
            features: list[Tensor] = []

            def hook(
                _site: int,
                at: Features,
                features: list[Tensor] = features,
                detached: bool = detached,
            ) -> Tensor:
                features.append(at.h)
                return at.h.detach().requires_grad_() if detached else at.h

            with casting():
                features.append(host.forward_with_hook(x, hook))
            outputs = [h.float().sum() for h in features if h.requires_grad]
            if outputs and parameters:
                torch.autograd.grad(torch.stack(outputs).sum(), parameters, allow_unused=True)
    host.eval()
    for x in evaluated:
        with host.without_gradients(), casting():
            host.forward_with_hook(x, lambda _site, at: at.h)


def _reason_of(error: Exception) -> str:
    """Returns the type of an error and the start of its message, on one line."""
    text = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    if len(text) > MAX_REASON:
        text = text[:MAX_REASON] + " ..."
    return f"{type(error).__name__}: {text}"
