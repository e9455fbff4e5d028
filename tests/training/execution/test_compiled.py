"""The compiled tier: eager numbers but for rounding, no graph break, and a reason where it cannot be had."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.core.place import Place
from esper.core.stage import SeedStage
from esper.env.vector_env import GrowthVectorEnv
from esper.hosts.cnn import CNNHost
from esper.hosts.graft import graft
from esper.hosts.host import Host, SegmentedHost
from esper.telemetry.event import StepsNotCaptured
from esper.training.execution import compiled
from esper.training.execution.compiled import compile_host, compiled_run
from esper.training.execution.workers import WorkerExecutor
from esper.training.executor import Execution
from esper.training.rng import OwnedDropout, RngHandle
from tests.core_helpers import Rig, digits, flat_baseline, rig, tiny_config
from tests.training.test_foreign_hosts import training_of

QUICK = "aot_eager"
"""Everything of the compiler but writing code."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiled, "BACKEND", QUICK)
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def draw(count: int) -> Tensor:
    x = torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(count))
    return x.to(memory_format=torch.channels_last)


def made(base: int = 3) -> SegmentedHost:
    torch.manual_seed(3)
    return CNNHost(3, 10, base=base, blocks=2)


def trained(host: Host, x: Tensor) -> list[Tensor]:
    """Logits, gradients and buffers after one pass in train mode."""
    host.train()
    logits = host(x)
    gradients = torch.autograd.grad(logits.square().mean(), list(host.parameters()))
    return [logits.detach(), *gradients, *host.buffers()]


def evaluated(host: Host, x: Tensor) -> Tensor:
    host.eval()
    with host.without_gradients():
        return host(x)


@pytest.mark.slow
@pytest.mark.finding("H2")
@pytest.mark.parametrize("base", [3, 8])  # thin, and with fused layers
def test_compiled_steps_equal_eager_ones_and_other_batches_compile_nothing(
    base: int,
) -> None:
    host, other = made(base), made(base)
    eager = copy.deepcopy(host)
    assert compile_host(host, [draw(20), draw(4)], [draw(20), draw(4)]) is None
    assert host.compiled is not None
    other.compiled = compiled_run(QUICK)
    with torch.compiler.set_stance("fail_on_recompile"):
        for count in (2, 3, 8, 17, 31):
            expected, wanted = (
                trained(eager, draw(count)),
                evaluated(eager, draw(count)),
            )
            for each in (host, other):
                for ours, theirs in zip(
                    trained(each, draw(count)), expected, strict=True
                ):
                    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(
                    evaluated(each, draw(count)), wanted, rtol=1e-4, atol=1e-5
                )


@pytest.mark.slow
@pytest.mark.finding("H2")
def test_compiling_a_host_changes_no_weight_buffer_gradient_or_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Passes of other batch sizes compile nothing more."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    torch.manual_seed(3)
    host = Layers()
    before = copy.deepcopy(host.state_dict())
    names = [name for name, _ in host.named_parameters()]

    def draw(count: int) -> Tensor:
        return torch.randn(count, 4, generator=torch.Generator().manual_seed(count))

    host.eval()
    random = torch.get_rng_state()
    assert compile_host(host, [draw(6)], [draw(5)]) is None
    assert not host.training
    assert torch.equal(torch.get_rng_state(), random)
    assert [name for name, _ in host.named_parameters()] == names
    assert all(parameter.grad is None for parameter in host.parameters())
    for name, value in host.state_dict().items():
        assert torch.equal(value, before[name]), name
    with torch.compiler.set_stance("fail_on_recompile"):
        for count in (3, 17):
            trained(host, draw(count))
            evaluated(host, draw(count))


@pytest.mark.slow
def test_a_copy_and_a_pickle_of_a_compiled_host_are_not_compiled() -> None:
    host = made()
    assert compile_host(host, [draw(4)], [draw(4)]) is None
    for other in (copy.deepcopy(host), pickle.loads(pickle.dumps(host))):
        assert other.compiled is None
        with torch.compiler.set_stance("fail_on_recompile"):
            torch.testing.assert_close(
                evaluated(other, draw(4)),
                evaluated(host, draw(4)),
                rtol=1e-4,
                atol=1e-5,
            )
    assert host.compiled is not None


class Layers(SegmentedHost):
    """Two small segments."""

    def __init__(self) -> None:
        first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        super().__init__([first, nn.Linear(4, 3)], [Place("r0c0", 4)], "mlp")


class Branching(nn.Module):
    """Looks at its values, which a compiler cannot."""

    def forward(self, h: Tensor) -> Tensor:
        return h if h.sum() > 0 else -h


class Moody(SegmentedHost):
    """Its second segment cannot be compiled."""

    def __init__(self) -> None:
        first = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3))
        last = nn.Sequential(
            Branching(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 10)
        )
        super().__init__([first, last], [Place("r0c0", 3)], "cnn")


class Breaking(Moody):
    """Fails in the pass itself, whether compiled or not."""

    def _from(self, *arguments: Any) -> Tensor:
        raise ZeroDivisionError("on purpose")


@pytest.mark.slow
@pytest.mark.trap(41)
def test_a_host_that_cannot_be_compiled_is_unchanged_and_has_a_reason() -> None:
    host = Moody()
    before = copy.deepcopy(host.state_dict())
    reason = compile_host(host, [digits().train.x[:4]])
    assert reason is not None
    assert reason.startswith("Unsupported: Data-dependent branching; ")
    assert "\n" not in reason
    assert len(reason) < 400
    assert host.compiled is None
    assert all(
        torch.equal(value, before[name]) for name, value in host.state_dict().items()
    )
    with torch.compiler.set_stance("fail_on_recompile"):
        evaluated(host, digits().train.x[:4])
    assert (
        compile_host(Breaking(), [digits().train.x[:4]])
        == "ZeroDivisionError: on purpose"
    )


class OwnWay(Moody):
    """Carries out its segments itself."""

    def _step(self, number: int, h: Tensor, *_: Any) -> tuple[Tensor, bool]:
        return self.segments[number](h), False


@pytest.mark.slow
@pytest.mark.trap(41)
def test_a_host_that_goes_its_own_way_is_not_called_compiled() -> None:
    host = OwnWay()
    reason = compile_host(host, [digits().train.x[:4]])
    assert (
        reason
        == "OwnWay has its own forward pass, which does not call run() for every step"
    )
    assert host.compiled is None


def test_grafted_hosts_and_hosts_that_draw_have_a_reason() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU())
    assert "grafted" in (compile_host(graft(model, {"r0c0": "0"}), []) or "")

    class Foreign(Host):
        def forward_with_hook(self, x: Tensor, at: Any, vacant: Any = ()) -> Tensor:
            return x

        def forward_from(
            self, x: Tensor, site: int, h: Tensor, at: Any, vacant: Any = ()
        ) -> Tensor:
            return x

    assert (compile_host(Foreign(), []) or "").startswith(
        "Foreign is not a SegmentedHost"
    )
    assert "random" in (compiled.compile_obstacle(made(), draws=True) or "")
    drops = made()
    drops.add_module("dropout", OwnedDropout(0.5, RngHandle(torch.Generator())))
    assert "random" in (compiled.compile_obstacle(drops) or "")


def env_of(
    build_host: Callable[[], Host], **sections: dict[str, Any]
) -> GrowthVectorEnv:
    config = tiny_config(2, 4, **{**sections, "run": {"lanes": 1, "tier": "compiled"}})
    return GrowthVectorEnv(
        replace(digits(), build_host=build_host), config, baseline=flat_baseline(4)
    )


@pytest.mark.trap(41)
def test_an_env_reports_why_its_hosts_are_eager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reason = "Unsupported: Data-dependent branching"
    monkeypatch.setattr(compiled, "compile_host", lambda *_: reason)
    with closing(env_of(Moody)) as training:
        assert training.execution == Execution("eager", reason)
        assert [
            t.host.compiled
            for t in training.training
            if isinstance(t.host, SegmentedHost)
        ] == [None, None]
        training.reset(seed=1)
        training.step(training.action_space.sample() * 0)
    monkeypatch.setenv("ESPER_REQUIRE_NATIVE", "1")
    with pytest.raises(
        RuntimeError, match="hosts are not compiled: Unsupported: Data-dependent"
    ):
        env_of(Moody)


def live(rig: Rig) -> None:
    """Two episodes of two hosts through all stages, by legal actions, with a prune and a reset of one host."""
    rig.grow("r0c0", SeedStage.FOSSILIZED, "conv_light", env=0)
    rig.grow("r1c0", SeedStage.BLENDING, "norm", env=1)
    rig.grow("r0c1", SeedStage.TRAINING, "attention", env=0)
    rig.do("PRUNE", "r1c0", env=1)
    rig.env.test_accuracy()
    rig.reset(options={"reset_mask": [True, False]})
    rig.grow("r0c1", SeedStage.HOLDING, "conv_heavy", env=0)


SETTINGS: dict[str, dict[str, Any]] = {
    "micro-batches": {
        "task": {"samples_per_epoch": 64, "batch_size": 32, "micro_batches": 5}
    },
    "ste": {"env": {"incubation": "ste"}},
    "bfloat16": {
        "task": {"samples_per_epoch": 64, "batch_size": 32, "precision": "bfloat16"}
    },
}


@pytest.mark.slow
@pytest.mark.finding("H2")
@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_compiles_nothing_after_its_env_was_made(name: str) -> None:
    """Epochs, validation, seeds that come and go, resets: torch raises where it would have to compile again."""
    settings = {**SETTINGS[name], "run": {"lanes": 2, "tier": "compiled"}}
    env = {**settings.get("env", {}), "max_seeds": 3, "one_incubating": False}
    with rig(2, 30, **{**settings, "env": env}) as run:
        assert run.env.execution == Execution("compiled")
        with torch.compiler.set_stance("fail_on_recompile"):
            live(run)


def test_reasons_why_steps_are_not_captured_are_reported_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        WorkerExecutor, "reasons", lambda self: {"dropout: it draws": 2, "another": 1}
    )
    with rig(1, 8) as run:
        run.step()
        run.step()
        assert [event.reason for event in run.of_kind(StepsNotCaptured)] == [
            "dropout: it draws",
            "another",
        ]


def test_a_named_tier_is_no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        WorkerExecutor, "reasons", lambda self: {"dropout: it draws": 2}
    )
    monkeypatch.setenv("ESPER_REQUIRE_NATIVE", "1")
    with rig(1, 8) as run:
        run.step()  # auto promised nothing
        run.env.config = run.env.config.with_values(run={"tier": "graph"})
        run.env._not_captured.clear()
        with pytest.raises(RuntimeError, match="left to PyTorch: dropout: it draws"):
            run.step()


def test_the_sizes_that_are_compiled_are_those_of_parts_and_of_last_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[set[int]] = []

    def note(_host: Any, trained: Any, evaluated: Any, *_more: Any) -> None:
        sizes.extend(({len(x) for x in trained}, {len(x) for x in evaluated}))

    monkeypatch.setattr(compiled, "compile_host", note)
    task = replace(digits(), evaluation_batch=150)  # of 400 samples
    parts = {"batch_size": 6, "micro_batches": 4, "samples_per_epoch": 12}
    assert compiled._compile_for_run(training_of(task, task=parts)) is None
    assert sizes == [{2, 1}, {150, 100}]
