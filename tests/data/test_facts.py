"""The facts of tasks that are known without loading them are those of the loaded tasks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.config import ConfigError, TrainingConfig
from esper.core.blueprints import BLUEPRINTS
from esper.core.place import Place
from esper.data.facts import (
    HOSTS,
    KNOWN,
    TaskFacts,
    check_known,
    check_processes,
    for_drawn,
    weights_file,
)
from esper.data.images import ImagePreset
from esper.data.names import ENV_ONLY, NAMES
from esper.data.task import facts_of
from esper.data.tasks import TASKS, load_task
from esper.env.planted_law import SimParams
from esper.env.varied import BLUEPRINTS_OFFERED, resolve
from esper.hosts.graft import GraftedHost


@pytest.mark.parametrize("name", ["digits", "digits_table", "chars", "code"])
def test_the_facts_are_those_of_the_loaded_task(name: str) -> None:
    found = facts_of(load_task(name))
    counted = KNOWN[name].samples
    if counted is None:  # which depends on this version of Python
        found = replace(found, samples=None)
    assert found == KNOWN[name]


@pytest.mark.parametrize(
    "preset", [entry for entry in TASKS.values() if isinstance(entry, ImagePreset)]
)
def test_the_facts_are_those_of_the_preset(preset: ImagePreset) -> None:
    samples = preset.source.train - preset.source.held_out
    usual: dict[str, Any] = {
        "samples": samples,
        "samples_per_epoch": samples,
        "batch_size": 128,
        "n_envs": 8,
    }
    settings = {
        key: value
        for key, value in preset.settings.items()
        if key in TaskFacts.__dataclass_fields__
    }
    assert KNOWN[preset.name] == TaskFacts(preset.name, **{**usual, **settings})


def test_every_task_has_facts() -> None:
    assert {*KNOWN} == {*NAMES} - {*ENV_ONLY}
    assert {*HOSTS} == {*NAMES} - {"varied"}
    law = SimParams()
    assert HOSTS["planted"].slots == dict.fromkeys(law.slots, law.blueprints)


def fitting(topology: str, place: Place) -> set[str]:
    return {*BLUEPRINTS.names(topology, [place], if_named=True, wider=True)}


@pytest.mark.parametrize("name", KNOWN)
def test_slots_and_blueprints_are_those_of_the_hosts(name: str) -> None:
    host = TASKS[name].build_host()
    default = host.slot_names
    assert tuple(sorted(HOSTS[name].slots)) == tuple(sorted(host.possible_slots))
    host.use_slots(host.possible_slots)
    if isinstance(host, GraftedHost):  # whose layers are found in a pass
        rows = name == "digits_table"
        host.probe(torch.zeros(2, 64) if rows else torch.zeros(2, 3, 32, 32))
    for place in host.sites:
        # A blueprint may suit the last block only.
        assert fitting(host.topology, place) <= {*HOSTS[name].slots[place.name]}
    for slots in HOSTS[name].slots.values():
        assert any({*slots} == fitting(host.topology, place) for place in host.sites)
    if name not in ("digits", "digits_table", "fashion_mnist"):  # which name theirs
        host.use_slots(HOSTS[name].default)
        assert host.slot_names == default


def config(task: str, *assignments: tuple[str, str, Any]) -> TrainingConfig:
    tables: dict[str, dict[str, Any]] = {
        "task": {"name": task},
        "run": {"controller": "none"},
    }
    for section, key, value in assignments:
        tables.setdefault(section, {})[key] = value
    return TrainingConfig.parse(tables)


WRONG: dict[str, tuple[TrainingConfig, str]] = {
    "slot": (
        config("chars", ("env", "slots", ["r4"])),
        r"env.slots: the hosts have no slot r4; possible: r0c0, r0c1, r1c0",
    ),
    "no slot": (config("digits", ("env", "slots", [])), "env.slots: name one or more"),
    "slot of simulated hosts": (
        config("planted", ("env", "slots", ["r1c0"])),
        "no slot r1c0; possible: r0c0, r0c1, r0c2",
    ),
    "blueprint": (
        config("tinystories", ("env", "blueprints", ["conv_light"])),
        "unknown 'conv_light'; known for transformer hosts: norm, lora",
    ),
    "blueprint of other slots": (
        config("mnist5k", ("env", "blueprints", ["widen_x4"])),
        r"'widen_x4' fits in no slot \(env.slots are r0, r1\); known for cnn hosts: norm",
    ),
    "blueprint twice": (
        config("digits_table", ("env", "blueprints", ["mlp", "mlp"])),
        "'mlp' is given more than once",
    ),
    "blueprint of drawn hosts": (
        config("varied", ("env", "blueprints", ["norm"])),
        "are widened, by widen_whole, .* not norm",
    ),
    "reward of drawn hosts": (
        config("varied", ("reward", "mode", "sparse")),
        "reward.mode=priced.; not sparse",
    ),
    "device of drawn hosts": (
        config("varied", ("run", "device", "cpu,cuda:1")),
        "run.device is cpu,cuda:1, but hosts of the task varied train on the CPU",
    ),
    "samples": (
        config("cifar100", ("task", "samples_per_epoch", 45_001)),
        "45001, but cifar100 has 45000 training samples",
    ),
    "batch": (
        config("chars", ("task", "batch_size", 1_001)),
        "1001, larger than the 1000 samples of an epoch of chars",
    ),
    "parts of a batch": (
        config("tinystories", ("task", "micro_batches", 17)),
        "17, more than the 16 samples of a batch",
    ),
    "rate": (
        config("code", ("task", "optimizer", "sgd")),
        "the learning rate of code, 0.006, is for adamw: set task.learning_rate",
    ),
    "means": (
        config("fashion_mnist", ("task", "beta2", 1.0)),
        "must be below 1",
    ),
    "weights": (
        config("digits", ("task", "start", "gone")),
        "task.start is 'gone', where no weights are; give one of: new; trained",
    ),
    "discounts": (
        config("mine.py:task", ("run", "controller", "ppo"), ("ppo", "gamma", 0.9)),
        "ppo.gamma is 0.9 and reward.gamma is 0.995: they must be equal",
    ),
    "discounts of drawn hosts": (
        config("varied", ("run", "controller", "ppo"), ("ppo", "gamma", 0.9)),
        "ppo.gamma is 0.9 and reward.gamma is 1.0",
    ),
    "part of a round": (
        config(
            "planted", ("run", "controller", "ppo"), ("ppo", "episodes_per_update", 3)
        ),
        "use a multiple of 64",
    ),
    "groups": (
        config("digits", ("run", "controller", "ppo"), ("ppo", "group", 3)),
        "ppo.group is 3: env.n_envs, here 8",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_contradicts_the_facts_is_refused(case: str) -> None:
    wrong, said = WRONG[case]
    with pytest.raises(ConfigError, match=said):
        check_known(wrong)


@pytest.mark.parametrize("task", [*NAMES, "mine.py:task"])
def test_the_defaults_of_every_task_suit_it(task: str) -> None:
    check_known(
        config(task, ("run", "controller", "ppo")),
        processes=2 if task != "planted" else 1,
    )


def test_code_of_a_user_may_bring_blueprints() -> None:
    check_known(config("digits", ("env", "blueprints", ["mine"])), own_code=True)


def test_data_of_a_users_task_is_not_known() -> None:
    values = [
        ("task", "batch_size", 10**6),
        ("env", "slots", ["r9"]),
        ("ppo", "group", 3),
    ]
    check_known(config("mine.py:task", ("run", "controller", "ppo"), *values))


@pytest.mark.parametrize(
    ("task", "processes"), [("planted", 2), ("digits", 9), ("varied", 65)]
)
def test_more_processes_than_hosts_are_refused(task: str, processes: int) -> None:
    with pytest.raises(ConfigError, match=r"in one process|use at most"):
        check_known(config(task), processes=processes)
    check_processes("digits", 9, None)


def test_drawn_hosts_are_resolved_with_their_needs() -> None:
    drawn = for_drawn(config("varied"))
    assert drawn.env.blueprints == BLUEPRINTS_OFFERED
    assert resolve(config("varied")).reward == drawn.reward


def test_weights_are_found_by_every_form(tmp_path: Path) -> None:
    for name in ("a.pt", "b.safetensors", "best_host.safetensors", "b.json"):
        (tmp_path / name).touch()
    found = {
        name: weights_file(str(tmp_path / name)).name
        for name in ("a.pt", "b", "b.json", "")
    }
    assert found == {
        "a.pt": "a.pt",
        "b": "b.safetensors",
        "b.json": "b.safetensors",
        "": "best_host.safetensors",
    }
