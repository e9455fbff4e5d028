"""Policy files: they play to the same bits, run no code, and a file that is not one is refused with the reason."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from esper.agents.make import controller_for
from esper.cli.options import build_tables
from esper.config import ConfigError, TrainingConfig
from esper.core.action import ActionSpec
from esper.env.make import make_env
from esper.files import checkpoint
from esper.files.policy import (
    HEADER,
    Facts,
    command_of,
    digest,
    find_policy,
    save_policy,
)
from esper.run.grow import grow
from esper.run.rollout import play_round
from tests.core_helpers import digits
from tests.run.run_helpers import (
    flat,
    learning,
    play,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose agent learned from simulated hosts."""
    summary, _ = play(
        learning("planted", n_envs=4, rounds=2),
        tmp_path_factory.mktemp("runs") / "agent",
    )
    return summary.folder


@pytest.fixture(scope="module")
def saved(run: Path) -> Path:
    file = run.parent / "mine.safetensors"
    save_policy(run, file, score={"task": "planted", "difference": float("inf")})
    return file


def header(file: Path) -> dict[str, Any]:
    with safetensors.safe_open(file, framework="pt") as content:
        found: dict[str, Any] = json.loads(content.metadata()[HEADER])
        return found


def rewritten(
    file: Path,
    target: Path,
    change: Callable[[dict[str, Any], dict[str, torch.Tensor]], Any],
    honest: bool = True,
) -> Path:
    """The file with a changed content, with a matching digest if ``honest``."""
    facts, tensors = header(file), safetensors.torch.load_file(file)
    change(facts, tensors)
    if honest:
        facts["sha256"] = digest(tensors)
    safetensors.torch.save_file(tensors, target, {HEADER: json.dumps(facts)})
    return target


def test_a_policy_comes_back_to_the_last_bit(run: Path, saved: Path) -> None:
    wanted = checkpoint.read(run)["policy"]
    found = find_policy(str(saved))
    assert flat(
        {name: found.state[name] for name in ("network", "observations")}
    ) == flat({name: wanted[name] for name in ("network", "observations")})
    assert found.state["config"] == wanted["config"]
    assert found.facts is not None
    assert found.rounds == found.facts.rounds == 2
    assert found.facts.score == {
        "task": "planted",
        "difference": "inf",
    }  # JSON has no infinity
    assert (
        found.facts.packages["torch"]
        == json.loads((run / "env.json").read_text())["packages"]["torch"]
    )


def test_a_policy_file_plays_as_its_run(run: Path, saved: Path) -> None:
    """The policy plays its likeliest actions, so the seed of the run does not matter."""
    config = TrainingConfig.parse(
        {"task": {"name": "planted"}, "env": {"n_envs": 8, "episode_length": 6}}
    )
    returns = []
    for seed, file in ((5, run), (5, run / checkpoint.NAME), (99, run), (5, saved)):
        with closing(make_env(config)) as env:
            policy = controller_for(f"checkpoint:{file}", config, env, seed)
            returns.append(play_round(env, policy, seed=5).returns)
    assert len(set(returns[0])) > 1
    for other in returns[1:]:
        np.testing.assert_array_equal(returns[0], other)


def parsed(command: str) -> TrainingConfig:
    """The config of an `esper run` command."""
    words = shlex.split(command)
    assert words[:2] == ["esper", "run"]
    assert words[2::2] == ["--set"] * len(words[3::2])
    flags = dict.fromkeys(("task", "envs", "episode_length", "seed", "device"))
    return TrainingConfig.parse(build_tables(None, tuple(words[3::2]), flags, {}))


def test_the_command_in_it_has_the_config_of_the_run(run: Path, saved: Path) -> None:
    assert parsed(header(saved)["command"]) == find_policy(str(run)).config


def test_lists_and_words_survive_the_shell() -> None:
    config = TrainingConfig.parse(
        {
            "task": {"schedule": "constant"},
            "env": {"blueprints": ("norm", "conv_light"), "auto_advance": ["G1"]},
        }
    )
    assert parsed(command_of(config)) == config


def test_machine_specific_values_are_left_out(run: Path, tmp_path: Path) -> None:
    config = find_policy(str(run)).config
    assert config is not None
    config = config.with_values(
        run={"device": "cuda:3", "lanes": 7},
        task={"data": "/my/data", "download": True},
    )
    save_policy(
        replace(find_policy(str(run)), config=config), tmp_path / "a.safetensors"
    )
    found = find_policy(str(tmp_path / "a.safetensors")).config
    assert found is not None
    assert (
        found.run.device,
        found.run.lanes,
        found.task.data,
        found.task.download,
    ) == ("cpu", None, None, False)


FOREIGN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not a policy: "),
    "text": (b"dear diary, today I wrote a file\n", "is not a policy: "),
    "other facts": (
        safetensors.torch.save({"w": torch.zeros(2)}, {"format": "pt"}),
        "its header has no entry 'esper_policy'",
    ),
    "a list": (
        safetensors.torch.save({}, {HEADER: "[1]"}),
        "it has format None, but this version of Esper",
    ),
    "another format": (
        safetensors.torch.save({}, {HEADER: '{"format": 99}'}),
        "it has format 99, but this version of",
    ),
    "the format of other entries": (
        safetensors.torch.save({}, {HEADER: '{"format": 5}'}),
        "whose agents see other entries of the env; train the agent again",
    ),
    "nothing beside the format": (
        safetensors.torch.save({}, {HEADER: '{"format": 6}'}),
        "slots: Field required",
    ),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_foreign_file_is_refused_by_its_name(case: str, tmp_path: Path) -> None:
    content, message = FOREIGN[case]
    file = tmp_path / "mine.safetensors"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as found:
        find_policy(str(file))
    assert str(file) in str(found.value)
    assert len(str(found.value).splitlines()) == 1


def test_a_missing_file_or_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no policy at .*gone\.safetensors"):
        find_policy(str(tmp_path / "gone.safetensors"))
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(ConfigError, match=r"no checkpoint at .*folder\.safetensors"):
        find_policy(str(tmp_path / "folder.safetensors"))


def test_a_file_that_was_cut_or_changed_is_refused(saved: Path, tmp_path: Path) -> None:
    content, file = saved.read_bytes(), tmp_path / "a.safetensors"
    for part in (content[:-1], content[: len(content) // 2], content + b"x"):
        file.write_bytes(part)
        with pytest.raises(ConfigError, match="is not a policy"):
            find_policy(str(file))
    flipped = bytearray(content)
    flipped[-1] ^= 1
    file.write_bytes(flipped)
    with pytest.raises(
        ConfigError, match="the weights do not match the checksum in its header"
    ):
        find_policy(str(file))


def other_name(_facts: Any, tensors: dict[str, torch.Tensor]) -> None:
    tensors["network.novelty"] = tensors.pop("network.ops.weight")


def other_shape(_facts: Any, tensors: dict[str, torch.Tensor]) -> None:
    tensors["observations.mean"] = tensors["observations.mean"][:-1].clone()


def not_a_number(_facts: Any, tensors: dict[str, torch.Tensor]) -> None:
    tensors["network.ops.weight"][0, 0] = float("nan")


def other_width(facts: dict[str, Any], _tensors: Any) -> None:
    facts["config"]["ppo"]["width"] = 32


def unknown_fact(facts: dict[str, Any], _tensors: Any) -> None:
    facts["novelty"] = 1


def words_for_rounds(facts: dict[str, Any], _tensors: Any) -> None:
    facts["rounds"] = "many"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_name, "network.novelty is float32 .*; expected no such tensor"),
        (other_shape, r"observations.mean is float64 \[\d+\]; expected float64"),
        (not_a_number, "network.ops.weight contain non-finite values"),
        (other_width, "; expected float32"),
        (unknown_fact, "novelty: Extra inputs"),
        (words_for_rounds, "rounds: Input should be a valid integer"),
    ],
)
def test_tensors_of_another_network_are_refused(
    change: Callable[..., None], message: str, saved: Path, tmp_path: Path
) -> None:
    """The digest is valid, as from a writer of another version."""
    file = rewritten(saved, tmp_path / "a.safetensors", change)
    with pytest.raises(ConfigError, match=message) as found:
        controller_for(
            f"checkpoint:{file}", TrainingConfig(), make_env(learning("planted")), 0
        )
    assert str(found.value).startswith(f"{file} is not a usable policy: ")


def test_a_policy_file_names_the_hosts_that_its_agent_learned_on(
    run: Path, saved: Path
) -> None:
    spec = make_env(learning("planted")).action_spec
    for file in (run, saved):
        policy = find_policy(str(file))
        assert policy.slots == spec.slots
        assert policy.blueprints == spec.blueprints


def test_settings_that_differ_from_those_of_learning_are_named(
    run: Path, saved: Path
) -> None:
    alike = make_env(learning("planted"))
    other = make_env(
        learning("planted").with_values(env={"edits_per_epoch": 2, "at_once": True})
    )
    for file in (run, saved):
        policy = find_policy(str(file))
        assert policy.unlike(alike.config, alike.action_spec) == ""
        words = policy.unlike(other.config, ActionSpec(("r0",), ("moss", "norm")))
        assert words.startswith("This agent learned on planted, 2 of 2 rounds")
        assert (
            "with env.edits_per_epoch=1, which is 2 here; with env.at_once=f" in words
        )
        assert words.endswith("moss, fern, oak, ivy, and with none of norm.")
    drawn = make_env(TrainingConfig.parse({"task": {"name": "varied"}}))
    shipped = find_policy("pretrained")
    assert shipped.unlike(drawn.config, drawn.action_spec) == ""


def test_only_an_agent_that_learned_is_saved(run: Path, tmp_path: Path) -> None:
    policy = find_policy(str(run))
    assert policy.config is not None
    config = policy.config.with_values(run={"controller": "checkpoint:other"})
    lone = tmp_path / "lone.pt"
    lone.write_bytes((run / checkpoint.NAME).read_bytes())
    for source in (replace(policy, config=config), lone):
        with pytest.raises(ConfigError, match="is not a run in which an agent learned"):
            save_policy(source, tmp_path / "a.safetensors")
    assert not (tmp_path / "a.safetensors").exists()


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_run_without_package_versions_is_not_saved(
    content: str | None, run: Path, tmp_path: Path
) -> None:
    for name in ("config.toml", checkpoint.NAME):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    if content is not None:
        (tmp_path / "env.json").write_text(content)
    with pytest.raises(
        ConfigError, match=r"env\.json cannot be read for the package versions"
    ):
        save_policy(tmp_path, tmp_path / "a.safetensors")


@pytest.mark.parametrize("name", ["a.pt", "there.safetensors", "gone/a.safetensors"])
def test_an_impossible_file_name_is_refused(
    name: str, run: Path, tmp_path: Path
) -> None:
    (tmp_path / "there.safetensors").write_text("dear diary")
    with pytest.raises(
        ConfigError, match=r"give a new file, NAME\.safetensors, in an existing folder"
    ):
        save_policy(run, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["there.safetensors"]
    assert (tmp_path / "there.safetensors").read_text() == "dear diary"


def test_the_shipped_agent_can_be_played_and_names_its_origin() -> None:
    """It fails if an update of Esper can no longer read the shipped agent."""
    found = find_policy("pretrained")
    assert found.config is not None
    assert found.config.task.name == "varied"
    assert found.facts is not None
    assert found.facts.command.startswith("esper run --set ")
    assert found.facts.rounds == found.config.run.rounds
    assert found.facts.score is not None
    assert found.facts.score["pairs"] >= 40
    score = found.facts.score["metrics"][0]
    (greedy,) = [pair for pair in score["comparisons"] if pair["name_a"] == "greedy"]
    assert greedy["interval"][0] > 0  # better than hosts left alone
    for fact in Facts.model_fields:
        assert "/tmp" not in str(getattr(found.facts, fact))


@pytest.mark.slow
def test_the_shipped_controller_grows_a_users_network() -> None:
    from torch import nn

    import esper

    def build() -> Any:
        model = nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1),
            nn.BatchNorm2d(3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(192, 10),
        )
        return esper.graft(model, {"r0c0": "2"})

    base = digits()
    task = esper.Task("mine", 10, build, base.train, base.validation, base.test)
    config = TrainingConfig.parse(
        {"env": {"baseline_episodes": 1}, "task": {"samples_per_epoch": 128}}
    )
    found = grow(task, controller="pretrained", epochs=6, config=config)
    assert set(found.seeds) <= {"r0c0"}
    assert 0 < found.accuracy <= 100
