"""A grown host in its two files: it is loaded as it was saved, and invalid files are refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from esper.config import ConfigError
from esper.core.blueprints import BLUEPRINTS
from esper.core.ramps import STYLES
from esper.core.stage import SeedStage
from esper.data.task import resolve
from esper.data.tasks import load_task
from esper.files.grown_host import accuracy, committed_network, export, load_host
from esper.show.read import open_run
from esper.telemetry.event import EpisodeCompleted
from esper.training.host_training import HostTraining
from esper.training.metrics import make_metrics
from tests.core_helpers import plant, tiny_config
from tests.recorded import Recorded


@pytest.fixture
def grown(recorded: Recorded) -> Path:
    """The stem of the best host of a run that grew."""
    return recorded.grown / "best_host"


def facts_of(stem: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(stem.with_suffix(".json").read_text())
    return facts


def same_accuracies(stem: Path) -> None:
    facts, task, network = facts_of(stem), load_task("digits"), load_host(stem)
    assert accuracy(network, task.test.x, task.test.y) == facts["test_accuracy"]
    assert (
        accuracy(network, task.validation.x, task.validation.y)
        == facts["validation_accuracy"]
    )


def test_the_loaded_host_has_the_accuracy_that_was_written(grown: Path) -> None:
    same_accuracies(grown)
    assert list(facts_of(grown)["slots"]) == ["r0c0"]


def fossil(style: str, blueprint: str = "conv_light") -> HostTraining:
    """A host of digits that keeps a seed in r0c0, with weights that are not those of a new one."""
    task = load_task("digits")
    config = resolve(tiny_config(), task)
    training = HostTraining(0, task, config, make_metrics(1, torch.device("cpu"))[0])
    training.reset(0, 0)
    plant(training, "r0c0", blueprint, style, SeedStage.FOSSILIZED)
    with torch.no_grad():
        for parameter in training.fossils()["r0c0"].module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return training


def comes_back(training: HostTraining, stem: Path) -> None:
    x = training.task.test.inputs(0, 50)
    network = committed_network(training)
    export(network, stem)
    torch.testing.assert_close(load_host(stem)(x), network(x), rtol=0, atol=0)


@pytest.mark.trap(14)
@pytest.mark.parametrize("style", STYLES)
def test_every_style_comes_back(style: str, tmp_path: Path) -> None:
    comes_back(fossil(style), tmp_path / "host")
    saved = facts_of(tmp_path / "host")["slots"]["r0c0"]["style"]
    assert STYLES[saved] == STYLES[style]


def test_the_best_host_is_that_of_validation_not_of_test(grown: Path) -> None:
    facts = facts_of(grown)
    ended = open_run(grown.parent).of(EpisodeCompleted)
    best = max(ended, key=lambda episode: episode.committed_accuracy)
    assert facts["validation_accuracy"] == best.committed_accuracy
    assert (facts["env"], facts["episode"]) == (best.env, best.episode)


def test_the_file_counts_parameters(grown: Path) -> None:
    facts, network = facts_of(grown), load_host(grown)
    assert facts["host_parameters"] == 277
    assert (
        facts["parameters"] == 277 + 9 * 3 * 3 + 3 * 3
    )  # conv_light on the three channels of r0c0
    assert sum(p.numel() for p in network.parameters()) == facts["parameters"]


def test_the_loaded_host_is_in_eval_mode_and_can_be_trained(grown: Path) -> None:
    network, task = load_host(grown), load_task("digits")
    assert not any(module.training for module in network.modules())
    nn.functional.cross_entropy(network(task.train.x[:8]), task.train.y[:8]).backward()  # type: ignore[no-untyped-call]
    assert all(
        p.grad is not None and bool(p.grad.abs().sum() > 0)
        for p in network.seeds.parameters()
    )


def test_two_loads_share_nothing(grown: Path) -> None:
    first, second = load_host(grown), load_host(grown)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    assert all(bool(p.abs().sum() > 0) for p in second.parameters())


def test_loading_touches_no_generator_of_the_process(grown: Path) -> None:
    before = torch.get_rng_state()
    load_host(grown)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_stem_may_have_dots(tmp_path: Path) -> None:
    training = fossil("LINEAR_ADD")
    for version in ("best.v1", "best.v2"):
        comes_back(training, tmp_path / version)
    assert len(list(tmp_path.iterdir())) == 4


Change = Callable[[dict[str, Any]], object]

BROKEN: dict[str, Change] = {
    "null": lambda facts: None,
    "format in words": lambda facts: {**facts, "format": "one"},
    "unknown task": lambda facts: {**facts, "task": "nope"},
    "without task": lambda facts: facts.pop("task") and facts,
    "another topology": lambda facts: {**facts, "topology": "transformer"},
    "slots that are a list": lambda facts: {**facts, "slots": ["r0c0"]},
    "a slot that the host has not": lambda facts: {
        **facts,
        "slots": {"r9c9": facts["slots"]["r0c0"]},
    },
    "a slot more": lambda facts: {
        **facts,
        "slots": {**facts["slots"], "r0c1": facts["slots"]["r0c0"]},
    },
    "unknown blueprint": lambda facts: change_slot(facts, blueprint="nope"),
    "another style": lambda facts: change_slot(facts, style="GATED_GATE"),
    "alpha that is no number": lambda facts: change_slot(facts, alpha=float("nan")),
    "alpha above 1": lambda facts: change_slot(facts, alpha=7.0),
}


def change_slot(facts: dict[str, Any], **values: Any) -> dict[str, Any]:
    return {**facts, "slots": {"r0c0": {**facts["slots"]["r0c0"], **values}}}


def copy(grown: Path, folder: Path) -> Path:
    for ending in (".json", ".safetensors"):
        shutil.copy(grown.with_suffix(ending), folder / f"host{ending}")
    return folder / "host"


def refused(stem: Path, *wanted: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_host(stem)
    message = str(caught.value)
    for text in (str(stem), *wanted):
        assert text in message
    assert "None does not exist" not in message
    return message


def test_a_host_with_seeds_is_no_host_to_load_into(grown: Path) -> None:
    with pytest.raises(
        ConfigError,
        match="model= is a host with seeds: pass the host that it was grown from",
    ):
        load_host(grown, model=load_host(grown))


@pytest.mark.parametrize("case", BROKEN)
def test_an_invalid_topology_is_refused(case: str, grown: Path, tmp_path: Path) -> None:
    stem = copy(grown, tmp_path)
    stem.with_suffix(".json").write_text(json.dumps(BROKEN[case](facts_of(stem))))
    refused(stem)


def test_an_unknown_blueprint_is_named_with_the_known_ones(
    grown: Path, tmp_path: Path
) -> None:
    stem = copy(grown, tmp_path)
    stem.with_suffix(".json").write_text(
        json.dumps(change_slot(facts_of(stem), blueprint="mine"))
    )
    refused(stem, "'mine'", "conv_light")


def test_another_format_is_refused_as_such(grown: Path, tmp_path: Path) -> None:
    stem = copy(grown, tmp_path)
    stem.with_suffix(".json").write_text(
        json.dumps({"format": 3, "everything": "else"})
    )
    refused(stem, "format 3", "reads format 2")


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"format": 1', b"\xff\xfe\x00", b"null"]
)
def test_a_torn_topology_is_refused(
    content: bytes, grown: Path, tmp_path: Path
) -> None:
    stem = copy(grown, tmp_path)
    stem.with_suffix(".json").write_bytes(content)
    refused(stem)


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def pickled(path: Path) -> None:
    torch.save({"a": 1}, path)


def resized(path: Path) -> None:
    weights = safetensors.torch.load_file(path)
    name = next(name for name in weights if name.startswith("seeds."))
    safetensors.torch.save_file({**weights, name: torch.zeros(5)}, path)


def extended(path: Path) -> None:
    safetensors.torch.save_file(
        {**safetensors.torch.load_file(path), "more": torch.zeros(1)}, path
    )


@pytest.mark.parametrize("spoil", [halved, emptied, pickled, resized, extended])
def test_weights_that_do_not_fit_are_refused(
    spoil: Callable[[Path], None], grown: Path, tmp_path: Path
) -> None:
    stem = copy(grown, tmp_path)
    spoil(stem.with_suffix(".safetensors"))
    refused(stem)


@pytest.mark.parametrize("ending", [".json", ".safetensors"])
def test_a_missing_file_is_named(ending: str, grown: Path, tmp_path: Path) -> None:
    stem = copy(grown, tmp_path)
    stem.with_suffix(ending).unlink()
    refused(stem, f"host{ending}", "does not exist")


def test_weights_of_another_host_are_refused(grown: Path, tmp_path: Path) -> None:
    """The two files are written one after the other: a crash between them must not give a host that never was."""
    stem = copy(grown, tmp_path)
    weights = safetensors.torch.load_file(stem.with_suffix(".safetensors"))
    moved = {name: t + 1 if t.is_floating_point() else t for name, t in weights.items()}
    safetensors.torch.save_file(moved, stem.with_suffix(".safetensors"))
    refused(stem)


def test_a_registered_blueprint_is_grown_saved_and_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BLUEPRINTS, "_table", dict(BLUEPRINTS._table))

    @BLUEPRINTS.register(
        "cnn", "tests_pointwise", parameters=lambda channels: channels * channels
    )
    def pointwise(channels: int) -> nn.Module:
        """One 1×1 convolution."""
        return nn.Conv2d(channels, channels, 1, bias=False)

    comes_back(fossil("LINEAR_ADD", "tests_pointwise"), tmp_path / "host")
    seed = facts_of(tmp_path / "host")["slots"]["r0c0"]
    assert seed["blueprint"] == "tests_pointwise"
