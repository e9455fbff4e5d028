"""Validation: its mode (finding L2), who writes what (H5, C1, trap 31), and what the one transfer brings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from esper.core.place import Place
from esper.core.stage import SeedStage as S
from esper.data.task import Task
from esper.env.training_backend import EnvHost
from esper.hosts.graft import graft
from esper.hosts.host import Host, SegmentedHost
from esper.training.counterfactual import CounterfactualHelper
from esper.training.execution.workers import WorkerExecutor
from esper.training.host_training import HostTraining
from esper.training.metrics import make_metrics
from esper.training.step import train_epoch
from esper.training.validate import evaluate
from tests.core_helpers import (
    digits,
    plant,
    rig,
    same_bits,
    tensors_of,
    train,
)
from tests.training.test_foreign_hosts import of, training_of

CPU = torch.device("cpu")


class Watched(nn.Module):
    """Notes in which mode it runs."""

    def __init__(self, seen: list[dict[str, Any]]) -> None:
        super().__init__()
        self.seen = seen
        self.layer = nn.Conv2d(1, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        autocast = torch.is_autocast_enabled("cpu")
        mode = {
            "inference": torch.is_inference_mode_enabled(),
            "grad": torch.is_grad_enabled(),
        }
        self.seen.append({**mode, "autocast": autocast, "training": self.training})
        out: Tensor = self.layer(x)
        assert out.dtype == (torch.bfloat16 if autocast else torch.float32)
        return out


@pytest.mark.finding("L2")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("grafted", [False, True])
def test_validation_runs_in_inference_mode_and_in_the_precision_of_training(
    dtype: str, grafted: bool
) -> None:
    """Hosts whose layers may keep what they see for a training pass are the exception: they run without gradients."""
    seen: list[dict[str, Any]] = []

    def build_host() -> Host:
        tail = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
        if grafted:
            return graft(nn.Sequential(Watched(seen), tail), {"r0c0": "0"})
        return SegmentedHost([Watched(seen), tail], [Place("r0c0", 4)], "cnn")

    training = training_of(of(build_host), task={"precision": dtype})
    plant(training, "r0c0", stage=S.HOLDING)
    seen.clear()
    evaluate(training, digits().validation, [(1.0,), (0.0,)])
    assert seen
    wanted = {
        "inference": not grafted,
        "grad": False,
        "autocast": dtype == "bfloat16",
        "training": False,
    }
    assert all(mode == wanted for mode in seen)
    seen.clear()
    train(training)
    assert seen
    assert all(
        mode == {**wanted, "inference": False, "grad": True, "training": True}
        for mode in seen
    )


# What is read


# Who writes


STAGES = (None, S.GERMINATED, S.TRAINING, S.BLENDING, S.HOLDING, S.FOSSILIZED)


def fleet(count: int = len(STAGES), task: Task | None = None) -> list[HostTraining]:
    """Envs over one block of totals, one of each stage, and all with a fossil."""
    task = task or digits()
    totals = make_metrics(count, CPU, 12, len(task.validation))
    envs = []
    for index in range(count):
        training = training_of(task, index=index)
        training.totals = totals[index]
        stage = STAGES[index % len(STAGES)]
        if stage is not None:
            plant(
                training,
                "r0c0",
                stage=stage,
                target=0.7 if stage is S.BLENDING else 1.0,
            )
        plant(training, "r1c1", "attention", "GATED_GATE", S.FOSSILIZED)
        envs.append(training)
    return envs


def epoch(training: HostTraining) -> None:
    train_epoch(training)
    evaluate(
        training,
        training.task.validation,
        CounterfactualHelper().plan(training.sites, costly=True),
        totals=training.totals,
    )


def bits_of(envs: list[HostTraining]) -> dict[str, Tensor]:
    accumulators = envs[0].totals.accumulators
    found = {
        "block": accumulators.block.clone(),
        "correct": accumulators.correct.clone(),
    }
    for training in envs:
        seeds = tuple(training.seed_groups)
        found |= {
            f"{training.index}.{name}": tensor
            for name, tensor in tensors_of(training, seeds).items()
        }
    return found


@pytest.mark.finding("C1")
@pytest.mark.trap(31)
@settings(max_examples=2, deadline=None)
@given(
    rounds=st.lists(
        st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True),
        min_size=1,
        max_size=3,
    ),
    workers=st.integers(2, 6),
)
def test_a_row_changes_when_its_host_runs_and_at_no_other_time(
    rounds: list[list[int]], workers: int
) -> None:
    torch.set_num_threads(1)
    envs, alone = fleet(5), fleet(5)
    with WorkerExecutor(workers) as pool:
        for active in rounds:
            before = envs[0].totals.accumulators.read()
            pool.run(epoch, [envs[index] for index in active])
            now = envs[0].totals.accumulators
            for index in range(5):
                if index in active:
                    assert float(now.block[index, 0, 2]) == 64
                    epoch(alone[index])
                else:
                    assert torch.equal(before.block[index], now.block[index])
                    assert torch.equal(before.correct[index], now.correct[index])
    same_bits(bits_of(alone), bits_of(envs))


class Writes(TorchDispatchMode):
    """Operators that the thread in which it is entered runs, and the memory that they write to."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []
        self.written: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.operators.append(str(func))
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            if (
                argument.alias_info is not None
                and argument.alias_info.is_write
                and isinstance(value, Tensor)
            ):
                self.written.add(value.untyped_storage().data_ptr())
        return func(*args, **kwargs)


@pytest.mark.finding("H5")
def test_alphas_of_counterfactuals_are_made_by_the_worker_that_reads_them() -> None:
    """The plan is plain numbers, and the thread that starts the workers runs no operator while they validate."""
    with rig(n_envs=2, horizon=9) as world:
        world.grow("r0c0", S.BLENDING)
        world.grow("r0c1", S.TRAINING)
        hosts = [world.host(index) for index in range(2)]
        of_workers: list[list[str]] = []

        def validate(host: EnvHost) -> None:
            with Writes() as writes:
                host.validate()
            of_workers.append(writes.operators)

        with Writes() as main:
            world.env.executor.run(validate, hosts)
        assert main.operators == []
        plan = hosts[0].counterfactual.configurations
        assert len(plan) > 2
        assert all(
            type(alpha) is float for configuration in plan for alpha in configuration
        )
        assert any(
            "esper.tape_scores_.default" in operators for operators in of_workers
        )  # at the place of reading
        assert len(of_workers) == 2
