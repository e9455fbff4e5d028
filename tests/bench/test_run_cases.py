"""The cases of `esper-bench` that run hosts measure what they say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from importlib import import_module

import pytest
import torch

from esper.attribution.counterfactual import CounterfactualHelper
from esper.bench import end_to_end, env_step, plain, process_memory, train_epoch, validate
from esper.bench.idle import idle_share
from esper.bench.main import RUNS
from esper.bench.plain import PlainTraining, plain_cnn
from esper.bench.request import BenchArgs
from esper.bench.runner import BenchCase, measure
from esper.bench.sinks import full_telemetry
from esper.bench.synthetic import growth_env, image_task, split
from esper.data import digits
from esper.hosts.cnn import CNNHost
from esper.seeds.site import Role
from esper.training.validate import evaluate
from tests.telemetry.sample_events import completed, cut

CPU = torch.device("cpu")


def first_of(case: str, **request: object) -> Iterator[BenchCase]:
    with closing(import_module(RUNS[case]).comparisons(BenchArgs(**request))) as found:  # type: ignore[arg-type]
        yield next(found)


@pytest.mark.parametrize("case", ["validate", "env-step", "telemetry-overhead"])
def test_a_case_runs_both_sides(case: str) -> None:
    for comparison in first_of(case, quick=True):
        result = measure(comparison, rounds=1)
        assert result.value > 0
        assert result.baseline_value > 0
        assert comparison.device == CPU


# train-epoch


def test_the_row_with_the_bar_is_that_of_the_page() -> None:
    size = (4, 128, 8)
    assert train_epoch.BARS["cpu", size] == 3.0
    assert train_epoch.BARS["cuda", (8, 128, 8)] == 5.0
    assert train_epoch.samples_of(size, CPU, quick=False) == 5120
    assert train_epoch.DEFAULT_SIZES["cpu"][0] == size
    assert len(set(train_epoch.SWEEP)) == 24
    assert {device_size[1] for device_size in train_epoch.BARS} <= set(train_epoch.SWEEP)


@pytest.mark.parametrize("size", train_epoch.SWEEP)
@pytest.mark.parametrize("quick", [True, False])
def test_an_epoch_is_full_batches(size: tuple[int, int, int], quick: bool) -> None:
    samples = train_epoch.samples_of(size, CPU, quick)
    assert samples % size[1] == 0
    assert samples >= size[1] * (1 if quick else 2)


@pytest.mark.parametrize(
    ("host", "other"),
    [
        (CNNHost(3, 10, base=4, blocks=3), plain_cnn(3, 10, base=4, blocks=3)),
        (digits.build_host(), plain_cnn(1, 10, base=3, blocks=2, pool_last=False)),
    ],
)
def test_both_sides_train_the_same_network(host: CNNHost, other: torch.nn.Module) -> None:
    # Buffers of the two come in one order, whatever they are called.
    own = list(host.state_dict().values())
    other.load_state_dict(dict(zip(other.state_dict(), own, strict=True)))
    x = torch.randn(4, 1 if len(own) < 15 else 3, 16, 16)
    torch.testing.assert_close(other.train()(x), host.train()(x))
    torch.testing.assert_close(other.eval()(x), host.eval()(x))


def test_the_plain_side_learns_every_host_in_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "BATCHES", 1)
    data = split(64, 0, CPU)
    x = data.inputs(0, len(data))
    data.y[:] = x[:, 0].mean(dim=(1, 2)).gt(0).long()
    training = PlainTraining([plain_cnn(3, 10, 4, 3) for _ in range(2)], x, data.y, batch=16)
    first = [training._train(number, None)[0] for number in range(2)]
    for _ in range(5):
        training.epoch()
    assert all(training._train(number, None)[0] < loss for number, loss in enumerate(first))
    assert 1 <= training.threads <= plain.candidates(64)[-1]
    assert f"best threads: {training.threads}" in str(training)


def test_the_plain_side_leaves_the_number_of_threads_as_it_was() -> None:
    data = split(8, 0, CPU)
    training = PlainTraining([plain_cnn(3, 10, 2, 1)], data.inputs(0, len(data)), data.y, batch=4)
    training.threads = 2
    training.epoch()
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(("cores", "tried"), [(1, [1]), (3, [1, 2, 3]), (20, [*range(1, 9), 16, 20])])
def test_all_numbers_of_threads_are_tried_where_there_are_few(cores: int, tried: list[int]) -> None:
    assert plain.candidates(cores) == tried


@pytest.mark.slow
def test_memory_is_that_of_a_process_of_its_own() -> None:
    peak = process_memory.measure_apart(1, 64, 8, CPU)
    assert peak.resident > 1e6
    assert peak.device == 0
    with pytest.raises(RuntimeError, match="measuring memory failed"):
        process_memory.measure_apart(1, 64, 8, torch.device("meta"))


@pytest.mark.parametrize(
    ("spans", "share"),
    [
        ([(0, 10)], 0.0),
        ([(0, 10), (30, 40)], 50.0),
        ([(30, 40), (0, 10), (5, 20), (6, 8)], 25.0),
        ([(0, 40), (10, 20), (50, 80)], 12.5),
    ],
)
def test_a_gpu_is_idle_where_no_stream_runs(spans: list[tuple[int, int]], share: float) -> None:
    assert idle_share(spans) == pytest.approx(share)


def test_a_gpu_that_does_nothing_has_no_share() -> None:
    with pytest.raises(ValueError, match="nothing ran on the GPU"):
        idle_share([])


# validate


def test_eight_configurations_in_one_walk_and_one_by_one_are_the_same() -> None:
    task = image_task(8, 2, CPU, validation=20)
    with growth_env(task, envs=1, batch=4) as env:
        host = env.training[0]
        validate.blend(host)
        assert sum(site.role is Role.BLENDED for site in host.sites) == 3
        everything = CounterfactualHelper().plan(host.sites, costly=True)
        assert len(set(everything)) == 8
        together = evaluate(host, task.validation, everything)
        for row, configuration in enumerate(everything):
            alone = evaluate(host, task.validation, [configuration])
            assert torch.equal(together.correct[row], alone.correct[0])
            torch.testing.assert_close(together.loss[row], alone.loss[0])


# env-step


def test_the_parts_of_a_step_add_up() -> None:
    task = image_task(8, 2, CPU, validation=8)
    with full_telemetry() as telemetry, growth_env(task, 2, 4, telemetry.emit, horizon=3) as env:
        steps = env_step.Steps(env, telemetry)
        for _ in range(5):  # into the next episode
            assert 0 < steps.step() < 100
        assert env.hosts.each[0].epoch == 2
        for policy, told, rest, everything in zip(*steps.shares.values(), strict=True):
            assert policy + told + rest == pytest.approx(everything)
            assert min(policy, told, rest) > 0
        assert telemetry.events >= 10


def test_telemetry_that_fails_is_not_measured() -> None:
    def measured() -> None:
        with full_telemetry() as telemetry:
            telemetry.hub._active["JsonlSink"].close()
            telemetry.emit(completed(1))

    with pytest.raises(RuntimeError, match="nothing was measured"):
        measured()


# ppo-update


def test_turns_of_the_update_are_all_the_same_work() -> None:
    pytest.importorskip("sb3_contrib")
    for comparison in first_of("ppo-update", sizes=((4, 5),)):
        for _ in range(2):
            comparison.run()
            comparison.run_baseline()
        assert comparison.size == "E 4, 5 steps, 4 x 4 minibatches, LSTM 128"


# end-to-end


def test_rates_are_those_of_the_rounds() -> None:
    times = end_to_end.RoundTimes()
    for event in (completed(1, samples=100, seconds=2.0), cut(1), completed(2, samples=300, seconds=3.0)):
        times.handle(event)
    assert (times.samples, times.seconds) == (400, 5.0)


def test_both_rows_of_a_run_are_of_the_same_turns() -> None:
    with closing(end_to_end.comparisons(BenchArgs(quick=True))) as found:
        images = measure(next(found), rounds=2)
        steps = measure(next(found), rounds=2)
    assert images.turns == steps.turns == 2
    assert images.value / steps.value == pytest.approx(64)
    assert images.ratio == pytest.approx(steps.ratio)
