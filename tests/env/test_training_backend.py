"""Reads of a step from the device: two transfers for all envs together, for any number of envs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from esper.core.stage import SeedStage
from esper.training.execution.workers import WorkerExecutor
from tests.core_helpers import Rig, plant, rig

READS = {
    *(
        "item",
        "tolist",
        "numpy",
        "nonzero",
        "equal",
        "allclose",
        "masked_select",
        "unique",
        "is_nonzero",
    ),
    *("__bool__", "__float__", "__int__", "__index__", "__array__", "__contains__"),
}
"""Functions whose answer the host has to wait for."""

SYNCS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
}


class Reads(TorchFunctionMode):
    """Pretends that every tensor lies on a device until `cpu` brings it over, and notes whatever needs one on the host.

    Tensors are on the CPU in truth, where `cpu` gives back the very same one and all reads are free. `to` goes to the
    device that the host trains on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.transfers: list[tuple[int, ...]] = []
        self.reads: list[str] = []
        self.here: dict[int, Tensor] = {}
        """Tensors on the host, by id; they are held so that no other tensor gets the same id."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(function, "__name__", "")
        given = list(tensors_in(args)) + list(tensors_in((kwargs or {}).values()))
        here = bool(given) and all(id(tensor) in self.here for tensor in given)
        over = name == "cpu" or (name == "to" and bool((kwargs or {}).get("copy")))
        if over and not here:
            self.transfers.append(tuple(given[0].shape))
        elif name in READS and not here:
            self.reads.append(name)
        result = function(*args, **(kwargs or {}))
        if over or here:
            self.here |= {id(tensor): tensor for tensor in tensors_in([result])}
        return result


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


class Syncs(TorchDispatchMode):
    """Notes operators that wait for the device, also those that are called from C++."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function.name().partition(".")[0] in SYNCS:
            self.found.append(function.name())
        return function(*args, **(kwargs or {}))


def run_here(
    _lanes: WorkerExecutor, work: Callable[[Any], None], envs: Iterable[Any]
) -> None:
    """`Executor.run` in the calling thread: modes of torch belong to a thread."""
    for env in envs:
        work(env)


@contextmanager
def busy(n_envs: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """Hosts in step, each with an incubating, a blended and a fossilized seed, whose tensors say that they are on no
    CPU, on which Esper reads some numbers, since there is nothing to wait for."""
    monkeypatch.setattr(WorkerExecutor, "run", run_here)
    monkeypatch.setattr(Tensor, "is_cpu", False)
    with rig(n_envs=n_envs, run={"tier": "eager"}) as world:
        for env in range(n_envs):
            plant(world.training(env), "r0c0", "norm", stage=SeedStage.FOSSILIZED)
            plant(world.training(env), "r0c1", "conv_light", stage=SeedStage.BLENDING)
            plant(world.training(env), "r1c0", "norm", stage=SeedStage.TRAINING)
        yield world


def reads_of_a_step(world: Rig) -> Reads:
    with Reads() as reads:
        world.step()
    return reads


@pytest.mark.trap(33)
@pytest.mark.parametrize("n_envs", [1, 3])
def test_a_step_brings_everything_over_in_two_transfers(
    n_envs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with busy(n_envs, monkeypatch) as world:
        for _ in range(2):
            reads = reads_of_a_step(world)
            assert reads.reads == []
            numbers = sum(len(episode.packed) for episode in world.env.backend.hosts)
            totals = world.training(0).totals.accumulators
            bytes_of_all = totals.block.nbytes + totals.correct.nbytes
            assert reads.transfers == [(bytes_of_all,), (numbers,)]


@pytest.mark.finding("M11")
def test_reads_do_not_depend_on_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    with busy(2, monkeypatch) as world:
        listening = reads_of_a_step(world)
        assert world.events
        monkeypatch.setattr(world.env, "emit", lambda _event: None)
        deaf = reads_of_a_step(world)
        assert (deaf.reads, deaf.transfers) == (listening.reads, listening.transfers)


@pytest.mark.trap(33)
@pytest.mark.parametrize("n_envs", [1, 3])
def test_training_and_validation_wait_for_nothing(
    n_envs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No operator inside waits either."""
    with busy(n_envs, monkeypatch) as world, Syncs() as syncs:
        world.env.backend.trainer.epoch(world.env.training)
        for episode in world.env.backend.hosts:
            episode.validate()
        assert syncs.found == []
