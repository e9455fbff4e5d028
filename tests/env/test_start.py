"""Starts of hosts: weights in a file, or their own training."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import safetensors.torch
import torch

from esper.config import ConfigError, TrainingConfig
from esper.core.blueprints import BLUEPRINTS
from esper.data.facts import weights_file
from esper.data.tasks import build_host, load_task
from esper.env.make import EnvMaker
from esper.env.start import recorded, started
from esper.env.vector_env import GrowthVectorEnv
from esper.files.grown_host import accuracy, assemble, export
from esper.hosts.grown import KeptSeed


def first_accuracy(start: Path | str, **env: object) -> float:
    """Validation accuracy of the hosts of a run before its first epoch."""
    sections = {
        "task": {"start": str(start)},
        "env": {"n_envs": 1, "episode_length": 2, "baseline_episodes": 1, **env},
    }
    made = EnvMaker.of(TrainingConfig.parse(sections)).make()
    assert isinstance(made, GrowthVectorEnv)
    with closing(made):
        made.reset(seed=1)
        return float(made.state.accuracy[0])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with a saved host that has a seed, as that of a run, and files of weights of a host without one."""
    torch.manual_seed(4)
    host = build_host("digits")
    torch.save(host.state_dict(), tmp_path / "plain.pt")
    safetensors.torch.save_file(host.state_dict(), tmp_path / "plain.safetensors")
    kept = {"r0c1": KeptSeed("conv_light", "LINEAR_ADD", 1.0)}
    grown = assemble(
        host, kept, {"r0c1": BLUEPRINTS.get("cnn", "conv_light")}, "digits"
    )
    with torch.no_grad():
        for parameter in grown.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    export(grown.eval(), tmp_path / "best_host")
    return tmp_path


@pytest.mark.parametrize("name", ["plain.pt", "plain.safetensors"])
def test_a_host_that_starts_from_weights_scores_what_they_score(
    saved: Path, name: str
) -> None:
    host = build_host("digits")
    host.load_state_dict(torch.load(saved / "plain.pt", weights_only=True))
    validation = load_task("digits").validation
    wanted = accuracy(host.eval(), validation.x, validation.y)
    assert first_accuracy(saved / name) == wanted


def test_a_saved_host_starts_with_its_seeds(saved: Path) -> None:
    for name in (".", "best_host", "best_host.json", "best_host.safetensors"):
        assert weights_file(str(saved / name)) == saved / "best_host.safetensors"
    task = started(load_task("digits"), str(saved))
    host = task.build_host().eval()
    assert sorted({key.split(".")[0] for key in host.state_dict()}) == ["host", "seeds"]
    validation = task.validation
    assert first_accuracy(saved) == accuracy(host, validation.x, validation.y)


def test_a_saved_host_with_seeds_grows_on(saved: Path) -> None:
    sections = {
        "task": {"start": str(saved), "samples_per_epoch": 128},
        "env": {
            "n_envs": 1,
            "episode_length": 3,
            "baseline_episodes": 1,
            "slots": ["r0", "r2"],
        },
    }
    env = EnvMaker.of(TrainingConfig.parse(sections)).make()
    assert isinstance(env, GrowthVectorEnv)
    with closing(env):
        env.reset(seed=1)
        assert set(env.action_spec.slots) == {"r0c0", "r0c1", "r2c0", "r2c1"}


def test_two_hosts_that_start_from_one_file_share_nothing(saved: Path) -> None:
    task = started(load_task("digits"), str(saved / "plain.pt"))
    one, other = task.build_host(), task.build_host()
    next(one.parameters()).data.zero_()
    assert bool(next(other.parameters()).any())


def test_nothing_to_start_from_is_an_error_that_lists_what_would_be_right(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"where no weights are; give one of: new; trained, .*a run folder",
    ):
        weights_file(str(tmp_path / "nowhere"))


def test_weights_of_another_host_are_refused_before_anything_starts(
    saved: Path,
) -> None:
    with pytest.raises(ConfigError, match="does not fit the host of digits_table"):
        started(load_task("digits_table"), str(saved / "plain.pt"))


def test_a_file_that_is_no_state_dict_is_refused(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ConfigError, match="holds a list, not a state dict"):
        started(load_task("digits"), str(tmp_path / "list.pt"))


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_broken_file_is_refused(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"broken{suffix}").write_bytes(b"half of it")
    with pytest.raises(ConfigError, match="does not fit the host of digits"):
        started(load_task("digits"), str(tmp_path / f"broken{suffix}"))


def test_a_run_records_its_weights_and_is_not_resumed_from_others(saved: Path) -> None:
    config = recorded(
        TrainingConfig.parse({"task": {"start": str(saved / "plain.pt")}})
    )
    assert config.task.start_sha256 is not None
    assert recorded(config) == config
    torch.save(build_host("digits").state_dict(), saved / "plain.pt")
    with pytest.raises(ConfigError, match="whose weights have changed"):
        recorded(config)


def test_hosts_of_another_width_cannot_start_from_a_file(saved: Path) -> None:
    maker = EnvMaker.of(
        TrainingConfig.parse({"task": {"start": str(saved / "plain.pt")}})
    )
    with pytest.raises(ConfigError, match="hosts of another width cannot start from"):
        maker.with_width(4)


def test_a_task_that_starts_again_starts_from_its_own_hosts(saved: Path) -> None:
    task = started(started(load_task("digits"), str(saved / "plain.pt")), "new")
    assert (task.origin, task.trained) == (None, False)
    assert not hasattr(task.build_host, "network")
