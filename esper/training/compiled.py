"""The compiled tier: segments of hosts go through ``torch.compile``; seeds, sites and the lifecycle stay as they are.

One compiled function serves the segments of all hosts: what was compiled for one env is what the next one runs. It
knows several variants of a segment, by mode, gradients, number format and threads. All that a run needs are compiled
before its first step: while torch compiles in one thread it changes how modules are called in all others.
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

from esper.data.task import Split
from esper.hosts.graft import GraftedHost
from esper.hosts.host import Host, Run, SegmentedHost, run_segment
from esper.ops import _native
from esper.training.device_lanes import OneDevice
from esper.training.env_state import ParallelEnvState
from esper.training.evaluate import evaluate
from esper.training.randomness import OwnedDropout, seeded
from esper.training.shadow import ShadowBuffers

BACKEND = "inductor"
"""torch.compile's, which writes C++ for a CPU and Triton for a GPU."""

MOST_VARIANTS = 200
"""Of all segments of all hosts in the process, which torch keeps in one list; its own limit is 8."""

MOST_WORDS = 300
"""Characters of a reason; what torch says about a failed compilation fills pages."""


class CompiledRun:
    """``run_segment``, compiled, without a graph break; for lanes to call side by side.

    Code serves ranges of batch sizes: 1 has code of its own, and on a CPU, where convolutions of small batches are
    other ones, so have those below 16.

    Which code fits a call, torch finds out by guards that take notes while they look: two threads that look at once get
    wrong answers. So one looks at a time; what it finds is carried out by all at the same time.
    """

    def __init__(self, backend: str) -> None:
        from torch._dynamo import lookup_backend  # takes a second to load

        self._looking = threading.Lock()
        self._compile_graph = lookup_backend(backend)
        options: dict[str, Any] = {"fullgraph": True, "dynamic": True, "backend": self._graph}
        if "recompile_limit" in inspect.signature(torch.compile).parameters:
            options["recompile_limit"] = MOST_VARIANTS
        else:  # torch before 2.13: for all that the process compiles
            limit = getattr(torch.compiler.config, "recompile_limit", MOST_VARIANTS)
            torch.compiler.config.recompile_limit = max(limit, MOST_VARIANTS)
        self._run: Run = torch.compile(run_segment, **options)

    def __call__(self, segment: nn.Module, h: Tensor) -> Tensor:
        with self._looking:
            return self._run(segment, h)

    def _graph(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """What torch calls in the end, compiled by the backend."""
        compiled = self._compile_graph(graph, inputs)

        def found(*arguments: Any) -> Any:
            self._looking.release()
            try:
                return compiled(*arguments)
            finally:
                self._looking.acquire()

        return found


@cache
def compiled_run(backend: str) -> CompiledRun:
    """One for the process, so that all hosts share what it has compiled."""
    return CompiledRun(backend)


def obstacle(host: Host, draws: bool = False) -> str | None:
    """Why segments of ``host`` are not even tried; ``draws``: it takes random numbers from the process's generator."""
    if isinstance(host, GraftedHost):
        return "a grafted model is caught at its sites by hooks, and has no segments to compile by themselves"
    if not isinstance(host, SegmentedHost):
        return f"{type(host).__name__} is no SegmentedHost, and has no segments to compile by themselves"
    if draws or any(isinstance(module, OwnedDropout) and module.p > 0 for module in host.modules()):
        return "the host draws random numbers, and would draw others in compiled code"
    return None


def compile_host(
    host: Host,
    trained: Sequence[Tensor],
    evaluated: Sequence[Tensor] = (),
    casting: Callable[[], AbstractContextManager[object]] = nullcontext,
    backend: str | None = None,
) -> str | None:
    """Compile the segments of ``host``, and try them; its weights, buffers and gradients stay as they are.

    Args:
        host: in the mode that it is in, which it keeps.
        trained: inputs [B, ...] for a forward and a backward pass in train mode, of each batch size that there
            will be.
        evaluated: inputs for a forward pass in eval mode.
        casting: the number format of passes.
        backend: of torch.compile; None: ``BACKEND``.

    Returns:
        None, or the reason why the host stays as it was.
    """
    reason = obstacle(host)
    if reason is not None:
        return reason
    assert isinstance(host, SegmentedHost)
    before, training = host.compiled, host.training
    run = compiled_run(backend or BACKEND)
    left_out = set(host.segments)

    def noting(segment: nn.Module, h: Tensor) -> Tensor:
        left_out.discard(segment)
        return run(segment, h)

    host.compiled = noting
    try:
        with seeded(0), ShadowBuffers(host).in_place():
            _rehearse(host, trained, evaluated, casting)
    except Exception as error:  # a network may do anything in its forward pass, and a compiler fail in any way
        host.compiled = before
        return _reason_of(error)
    finally:
        host.train(training)
    if left_out:
        host.compiled = before
        return f"{type(host).__name__} has a forward pass of its own, which does not call run() for every segment"
    host.compiled = run
    return None


def compile_hosts(envs: Sequence[ParallelEnvState], lanes: OneDevice) -> str | None:
    """Compile the hosts of ``envs``, all of one task, that have not begun an episode; or say why all stay as they are.

    What is compiled depends on the number of threads, too, so it is done where it will run: on a lane.

    Raises:
        RuntimeError: they cannot be compiled, and ``ESPER_REQUIRE_NATIVE=1`` allows no other way.
    """
    env = envs[0]
    reasons = [obstacle(env.host, env.host_draws_globally)]
    if reasons[0] is None:
        lanes.run(lambda first: reasons.append(_compile_for(first)), [env])
    if reasons[-1] is None:  # what slots are tried on runs between epochs, where there may be more threads
        reasons.append(compile_host(env.host, (), [env.sample]))
    if reasons[-1] is not None:
        for other in envs:
            if isinstance(other.host, SegmentedHost):
                other.host.compiled = None
        _native.refuse_fallback("hosts are not compiled", reasons[-1])
        return reasons[-1]
    for other in envs:
        assert isinstance(other.host, SegmentedHost)
        other.host.compiled = compiled_run(BACKEND)
    return None


def _compile_for(env: ParallelEnvState) -> str | None:
    """With the inputs that its training and validation passes will have."""
    task, sizes, dtype = env.task, env.config.task, env.arithmetic.image_dtype
    assert sizes.batch_size is not None

    def trained(count: int) -> Tensor:
        if isinstance(task.train, Split):
            return task.train.inputs(0, count, dtype)
        return task.calibration_inputs(count)

    parts = {len(rows) for rows in torch.arange(sizes.batch_size).chunk(sizes.micro_batches)}
    most = task.evaluation_batch
    evaluated = [
        split.inputs(0, count, dtype)
        for split in (task.validation, task.test)
        for count in {min(most, len(split) - start) for start in range(0, len(split), most)}
    ]
    reason = compile_host(env.host, [trained(count) for count in parts], evaluated, env.arithmetic.casting)
    if reason is None and env.calibration is not None:
        few = Split(task.validation.x[:2], task.validation.y[:2], task.validation.table)
        try:
            evaluate(env, few, [(0.0,) * len(env.slots)], calibrate=env.calibration)
        except Exception as error:  # as in compile_host
            return _reason_of(error)
    return reason


def _rehearse(
    host: SegmentedHost,
    trained: Iterable[Tensor],
    evaluated: Iterable[Tensor],
    casting: Callable[[], AbstractContextManager[object]],
) -> None:
    """The passes of a run: in training with features that lead back to the host's weights, and with features that a
    pass of an incubating seed begins at."""
    host.train()
    parameters = [parameter for parameter in host.parameters() if parameter.requires_grad]
    for x in trained:
        for begins in (False, True):
            left: list[Tensor] = []

            def at(_site: int, h: Tensor, left: list[Tensor] = left, begins: bool = begins) -> Tensor:
                left.append(h)
                return h.detach().requires_grad_() if begins else h

            with casting():
                left.append(host.walk(x, at))
            outputs = [h.float().sum() for h in left if h.requires_grad]
            if outputs and parameters:
                torch.autograd.grad(torch.stack(outputs).sum(), parameters, allow_unused=True)
    host.eval()
    for x in evaluated:
        with host.without_gradients(), casting():
            host.walk(x, lambda _site, h: h)


def _reason_of(error: Exception) -> str:
    """The kind of error and the first of what it says, on one line."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = "; ".join(line for line in lines if line)
    return f"{type(error).__name__}: {said if len(said) <= MOST_WORDS else said[:MOST_WORDS] + ' ...'}"
