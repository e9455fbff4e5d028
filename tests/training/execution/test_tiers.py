"""Execution tiers: the executor and the tier that a config gets."""

from __future__ import annotations

import pytest
import torch

from esper.config import ConfigError, RunConfig, TrainingConfig
from esper.training.execution import tiers
from esper.training.execution.multi_gpu import MultiGpuExecutor
from esper.training.execution.tiers import make_executor, prepare_hosts
from esper.training.execution.workers import WorkerExecutor
from esper.training.executor import Execution
from tests.core_helpers import rig


def test_graph_is_refused_on_a_cpu_and_the_others_named() -> None:
    with (
        pytest.raises(ConfigError, match="it can be auto, native, eager or compiled"),
        rig(1, 8, run={"tier": "graph"}),
    ):
        pass
    with pytest.raises(
        ConfigError, match="'auto', 'eager', 'native', 'compiled' or 'graph'"
    ):
        TrainingConfig.parse({"run": {"tier": "fast"}})


def test_a_cpu_trains_on_workers() -> None:
    with make_executor(RunConfig(lanes=3), torch.device("cpu")) as executor:
        assert isinstance(executor, WorkerExecutor)
        assert executor.count == 3
        assert prepare_hosts(RunConfig(), [], executor) == Execution("eager")


def test_several_devices_have_an_executor_each() -> None:
    with make_executor(
        RunConfig(lanes=1), torch.device("cpu"), torch.device("cpu")
    ) as executor:
        assert isinstance(executor, MultiGpuExecutor)


def test_hosts_that_cannot_be_compiled_are_eager_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = RunConfig(lanes=1, tier="compiled")
    with make_executor(config, torch.device("cpu")) as executor:
        monkeypatch.setattr(
            tiers, "compile_hosts", lambda _hosts, _executor: "no compiler"
        )
        assert prepare_hosts(config, [], executor) == Execution("eager", "no compiler")
        monkeypatch.setattr(tiers, "compile_hosts", lambda _hosts, _executor: None)
        assert prepare_hosts(config, [], executor) == Execution("compiled")
