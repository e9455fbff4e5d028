"""Hosts that are trained alone, to their limit, before an episode starts from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from esper.config import ConfigError, TrainingConfig
from esper.data.split import Split
from esper.data.task import Task, resolve
from esper.data.tasks import build_host, load_task
from esper.env.make import EnvMaker
from esper.env.start import started
from esper.env.vector_env import GrowthVectorEnv
from esper.hosts.host import Host
from esper.training import start
from esper.training.execution.tiers import make_executor
from esper.training.host_training import HostTraining
from esper.training.metrics import make_metrics
from esper.training.native import NativePasses
from esper.training.precision import concrete
from esper.training.rng import HELD_OUT
from esper.training.seed_pool import ParameterGroup
from tests.core_helpers import wait_actions


@pytest.fixture(autouse=True)
def _a_folder_of_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPER_DATA", str(tmp_path))


@pytest.fixture(autouse=True)
def _no_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One schedule is enough, except where it is about more of them."""
    monkeypatch.setattr(start, "MAX_RESTARTS", 0)


def short(epochs: int = 4, samples: int = 192, **changes: Any) -> Task:
    return replace(
        load_task("digits"),
        episode_length=epochs,
        samples_per_epoch=samples,
        warmup_epochs=0.5,
        **changes,
    )


@contextmanager
def env_of(hosts: Task, **sections: Any) -> Iterator[GrowthVectorEnv]:
    values: dict[str, Any] = {
        "task": {"start": "trained"},
        "env": {"n_envs": 2, "episode_length": 2, "baseline_episodes": 1},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    config = TrainingConfig.parse(values)
    env = EnvMaker.of(config, hosts).make()
    assert isinstance(env, GrowthVectorEnv)
    with closing(env):
        yield env


def weights(env: GrowthVectorEnv) -> list[dict[str, torch.Tensor]]:
    return [
        {name: value.clone() for name, value in each.host.state_dict().items()}
        for each in env.training
    ]


def equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, others[name]) for name, value in some.items())


def episode(env: GrowthVectorEnv) -> None:
    while not env.done.all():
        env.step(wait_actions(env.num_envs))


def test_a_host_starts_from_its_own_training_and_learns_on_with_a_new_schedule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start, "MAX_RESTARTS", 1)
    with env_of(short(samples=448)) as env:
        env.reset(seed=3)
        assert (env.state.accuracy > 20).all()  # a new host guesses, and has 10
        first, second = weights(env)
        assert not equal(first, second)
        episode(env)
        assert env.training[0].horizon == 2


def test_hosts_are_trained_first_in_compiled_code_where_a_run_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    epochs: dict[int, list[bool]] = {}
    train = NativePasses.train

    def counted(passes: NativePasses, groups: list[ParameterGroup]) -> bool:
        done = train(passes, groups)
        epochs.setdefault(passes.training.index, []).append(done)
        return done

    monkeypatch.setattr(NativePasses, "train", counted)
    with env_of(short(), run={"tier": "native"}) as env:
        env.reset(seed=3)
    alone = {
        index: done for index, done in epochs.items() if index >= start.FIRST_INDEX
    }
    assert list(alone.values()) == [[True] * 4] * 3  # two envs and the baseline


def test_the_episodes_of_a_run_start_from_the_same_weights_and_draw_other_batches() -> (
    None
):
    with env_of(short()) as env:
        env.reset(seed=3)
        at_first = weights(env)
        episode(env)
        after = weights(env)
        env.reset()
        assert all(equal(*pair) for pair in zip(at_first, weights(env), strict=True))
        episode(env)
        assert not equal(after[0], weights(env)[0])


def test_held_out_hosts_have_a_start_of_their_own_in_every_episode() -> None:
    with env_of(short()) as env:
        env.prepare()
        env.configure(run_seed=3 + HELD_OUT)
        env.reset()
        at_first = weights(env)
        episode(env)
        env.reset()
        assert not any(
            equal(*pair) for pair in zip(at_first, weights(env), strict=True)
        )


def test_what_is_trained_is_kept_and_used_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with env_of(short()) as env:
        env.reset(seed=3)
        at_first = weights(env)
    files = list((tmp_path / "starts").iterdir())
    assert len(files) == 3  # of two envs, and of the baseline

    def again(*_: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(start, "_train_to_limit", again)
    with env_of(short()) as env:
        env.reset(seed=3)
        assert all(equal(*pair) for pair in zip(at_first, weights(env), strict=True))


def of_leaky_host() -> Host:
    """A host with other activations, whose weights and shapes are those of the task's."""
    host = build_host("digits")
    for module in list(host.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, nn.LeakyReLU(0.3))
    return host


def smooth(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(
        outputs, y, reduction="none", label_smoothing=0.5
    )


def changed_inputs(task: Task) -> Split:
    assert isinstance(task.train, Split)
    x = task.train.x.clone()
    x[-1] += 1
    return replace(task.train, x=x)


CHANGES: dict[str, Callable[[Task], dict[str, Any]]] = {
    "epochs": lambda _task: {"episode_length": 2},
    "targets": lambda task: {"train": replace(task.train, y=task.train.y.flip(0))},
    "last inputs": lambda task: {"train": changed_inputs(task)},
    "activations": lambda _task: {"build_host": of_leaky_host},
    "loss": lambda _task: {"loss": smooth, "score": "accuracy"},
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_settings_or_other_data_are_another_training(
    name: str, tmp_path: Path
) -> None:
    task = short(1, 64, label_smoothing=0.0)
    for each in (task, replace(task, **CHANGES[name](task))):
        with env_of(each, env={"n_envs": 1}) as env:
            env.reset(seed=3)
    files = list((tmp_path / "starts").iterdir())
    assert len(files) == 4  # of an env and of the baseline, twice


def test_a_precision_and_auto_that_stands_for_it_are_one_training(
    tmp_path: Path,
) -> None:
    """An env resolves it before its hosts are made; the controls of a comparison leave that to their hosts."""
    task = started(short(), "trained")
    for precision in ("auto", concrete("auto", task.device)):
        config = TrainingConfig.parse(
            {"task": {"start": "trained", "precision": precision}}
        )
        host = HostTraining(
            0, task, resolve(config, task), make_metrics(1, task.device)[0]
        )
        host.reset(3, 0)
        with make_executor(config.run, task.device) as executor:
            start.give_starts([host], executor)
    assert len(list((tmp_path / "starts").iterdir())) == 1


def test_a_broken_file_is_trained_again(tmp_path: Path) -> None:
    with env_of(short()) as env:
        env.reset(seed=3)
        at_first = weights(env)
    for file in (tmp_path / "starts").iterdir():
        file.write_bytes(b"half of it")
    with env_of(short()) as env:
        env.reset(seed=3)
        assert all(equal(*pair) for pair in zip(at_first, weights(env), strict=True))


def test_weights_that_cannot_be_kept_are_used_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(start, "write_atomic", full)
    with env_of(short(samples=448), env={"n_envs": 1}) as env:
        with pytest.warns(
            UserWarning, match="are not kept, and are trained again when needed"
        ):
            env.reset(seed=3)
        assert (env.state.accuracy > 15).all()


def test_training_goes_on_until_half_a_schedule_gains_less_than_the_margin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained: list[int] = []
    scores = iter([50.0, 60.0, 70.0, 70.1])
    train = start._train

    def counted(hosts: Any, executor: Any) -> None:
        trained.append(hosts[0].horizon)
        train(hosts, executor)

    monkeypatch.setattr(start, "MAX_RESTARTS", 6)
    monkeypatch.setattr(start, "_train", counted)
    monkeypatch.setattr(start, "_accuracy", lambda _host: next(scores))
    monkeypatch.setattr("esper.env.no_growth.measure_baseline", lambda *_: None)
    with env_of(short(), env={"n_envs": 1, "episode_length": 2}) as env:
        env.configure(baseline=no_baseline())
        env.reset(seed=3)
    assert trained == [4, 2, 2, 2]


def no_baseline() -> Any:
    from esper.core.state import Baseline

    return Baseline((0.0,) * 3, (0.0,) * 3, 1.0, 1)


def test_a_host_that_diverges_before_it_starts_is_an_error_that_says_what_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def diverged(*_: Any) -> Any:
        return SimpleNamespace(
            loss=torch.tensor([float("inf")]), accuracy=torch.tensor([10.0])
        )

    monkeypatch.setattr(start, "evaluate", diverged)
    with (
        env_of(short()) as env,
        pytest.raises(
            ConfigError, match=r"a host diverged .* give the task a lower learning_rate"
        ),
    ):
        env.reset(seed=3)


def test_hosts_may_be_trained_on_another_task_before() -> None:
    task = short()
    half = replace(
        task,
        train=Split(task.train.x[:400], task.train.y[:400]),
        name="half",
    )
    with env_of(replace(task, earlier=half), env={"n_envs": 1}) as env:
        env.reset(seed=3)
        assert env.task.samples == 997
        file = start._file_of(start._untrained(env.training[0]))
        assert file.name.startswith("half-")
        assert file.exists()


def test_the_training_before_a_run_needs_no_setting_of_its_controller() -> None:
    sections = {"run": {"controller": "need"}, "env": {"need_every": 1}}
    with env_of(short(), **sections) as env:
        env.reset(seed=3)
    with env_of(short()) as other:
        other.reset(seed=3)
    assert all(map(equal, weights(env), weights(other)))
