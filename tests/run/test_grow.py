"""A user's own network and data: grown, saved, and loaded with the same accuracy, to the last digit."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from torch import nn

import esper
from esper.hosts.cnn import CNNHost
from esper.run.grow import _tried
from esper.show.view import RunView
from esper.telemetry.event import StageChanged
from tests.core_helpers import EASY_GATES, digits, rig

SCHEDULE = """
[[action]]
epoch = 0
op = "GERMINATE"
slot = "r0c0"
blueprint = "conv_light"
tempo = 3

[[action]]
epoch = 1
op = "ADVANCE"
slot = "r0c0"

[[action]]
epoch = 2
op = "ADVANCE"
slot = "r0c0"

[[action]]
epoch = 4
op = "ADVANCE"
slot = "r0c0"

[[action]]
epoch = 5
op = "FOSSILIZE"
slot = "r0c0"
"""


def model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )  # fmt: skip


def task() -> esper.Task:
    base = digits()

    def build_host() -> esper.hosts.graft.GraftedHost:
        return esper.graft(model(), {"r0c0": "3", "r0c1": "6"})

    return esper.Task("mine", 10, build_host, base.train, base.validation, base.test)


def config(**env: object) -> esper.TrainingConfig:
    return esper.TrainingConfig.parse(
        {
            "run": {"lanes": 1, "seed": 4},
            "task": {"samples_per_epoch": 256, "batch_size": 64},
            "env": {"baseline_episodes": 1, "gates": EASY_GATES, **env},
        }
    )


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("schedule") / "mine.toml"
    path.write_text(SCHEDULE)
    return f"schedule:{path}"


@pytest.fixture(scope="module")
def grown(schedule: str) -> esper.Grown:
    """A host with one seed, and the same host alone."""
    return esper.grow(task(), schedule, epochs=7, config=config())


def test_a_network_is_grown_saved_and_loaded_to_the_last_digit(
    grown: esper.Grown, tmp_path: Path
) -> None:
    mine = task()
    assert grown.seeds == {"r0c0": "conv_light"}
    assert grown.parameters == grown.host_parameters + 9 * 4 * 4 + 3 * 4
    assert esper.accuracy(grown.network, mine.test.x, mine.test.y) == grown.accuracy
    esper.export(grown.network, tmp_path / "saved" / "best")
    loaded = esper.load_host(tmp_path / "saved" / "best", model=model())
    assert esper.accuracy(loaded, mine.test.x, mine.test.y) == grown.accuracy
    assert torch.equal(loaded(mine.test.x), grown.network(mine.test.x))
    assert not any(parameter.is_inference() for parameter in loaded.parameters())


def test_the_host_alone_is_the_same_host(grown: esper.Grown) -> None:
    idle = esper.grow(
        task(), "heuristic", epochs=7, config=config(max_seeds=1, parameter_budget=1e-6)
    )
    assert idle.seeds == {}
    assert idle.accuracy == idle.alone == grown.alone


@pytest.mark.slow
def test_a_pretrained_network_starts_from_its_weights(schedule: str) -> None:
    base, pretrained = task(), model()
    grafted = esper.Task(
        "mine",
        10,
        lambda: esper.graft(_copy(pretrained), {"r0c0": "3"}),
        base.train,
        base.validation,
        base.test,
        learning_rate=1e-9,
    )
    grown = esper.grow(grafted, schedule, epochs=6, config=config(), alone=False)
    for name, weight in pretrained.named_parameters():
        torch.testing.assert_close(
            grown.network.host.get_parameter(f"model.{name}"), weight, rtol=0, atol=1e-6
        )


def _copy(network: nn.Module) -> nn.Module:
    made = model()
    made.load_state_dict(network.state_dict())
    return made


def test_a_users_host_is_loaded_only_with_its_model(
    grown: esper.Grown, tmp_path: Path
) -> None:
    esper.export(grown.network, tmp_path / "best")
    with pytest.raises(
        esper.ConfigError, match="pass a model of the same architecture as model="
    ):
        esper.load_host(tmp_path / "best")
    with pytest.raises(esper.ConfigError, match="no submodule '3'"):
        esper.load_host(tmp_path / "best", model=nn.Sequential(nn.Linear(2, 2)))
    wider = model()
    wider[10] = nn.Linear(8, 11)  # type: ignore[operator]
    with pytest.raises(esper.ConfigError, match="size mismatch"):
        esper.load_host(tmp_path / "best", model=wider)


def test_a_host_of_a_known_task_is_loaded_without_a_model(tmp_path: Path) -> None:
    base = digits()
    known = esper.Task(
        "digits",
        10,
        lambda: CNNHost(1, 10, 3, 2, pool_last=False),
        base.train,
        base.validation,
        base.test,
    )
    grown = esper.grow(known, "random", epochs=2, config=config(), alone=False)
    esper.export(grown.network, tmp_path / "best")
    loaded = esper.load_host(tmp_path / "best")
    assert torch.equal(loaded(base.test.x), grown.network(base.test.x))
    with pytest.raises(esper.ConfigError, match="omit model="):
        esper.load_host(tmp_path / "best", model=model())


def test_the_controller_none_cannot_grow() -> None:
    with pytest.raises(esper.ConfigError, match="controller none grows nothing"):
        esper.grow(task(), "none")
    with pytest.raises(esper.ConfigError, match="unknown controller 'oracle'; known"):
        esper.grow(task(), "oracle", epochs=3, config=config())


def test_growing_needs_the_events_of_hosts() -> None:
    minimal = config().with_values(telemetry={"level": "minimal"})
    with pytest.raises(esper.ConfigError, match="must be normal or debug"):
        esper.grow(task(), "random", config=minimal)


def test_a_run_grows_hosts_of_a_users_task(tmp_path: Path) -> None:
    settings = config(n_envs=2, episode_length=5).with_values(
        run={"controller": "random", "rounds": 1}
    )
    summary = esper.Experiment(settings, tmp_path / "run", task=task()).run()
    assert summary.comparison.pairs == 2
    loaded = esper.load_host(tmp_path / "run" / "best_host", model=model())
    facts = (tmp_path / "run" / "best_host.json").read_text()
    assert str(esper.accuracy(loaded, digits().test.x, digits().test.y)) in facts
    assert (
        hashlib.sha256(
            (tmp_path / "run" / "best_host.safetensors").read_bytes()
        ).hexdigest()
        in facts
    )
    assert 'name = "mine"' in (tmp_path / "run" / "config.toml").read_text()


def test_a_schedule_that_does_not_fit_is_no_baseline(tmp_path: Path) -> None:
    """The schedule that ships for `digits` names slots that this host does not have."""
    base = digits()
    task = esper.Task(
        "digits",
        10,
        lambda: CNNHost(1, 10, 3, 1, rows=1),
        base.train,
        base.validation,
        base.test,
    )
    chosen = config(n_envs=2, episode_length=5).with_values(run={"rounds": 1})
    experiment = esper.Experiment(chosen, tmp_path / "run", task=task)
    assert "schedule" not in experiment.trainer.agent.baselines
    experiment.close()


def test_a_log_with_gaps_costs_nothing_of_the_result() -> None:
    """On a full disk events get lost; the host that was grown is worth more."""
    with rig(1, 8) as world:
        world.do("GERMINATE", "r0c0", "norm")
        planted = world.of_kind(StageChanged)
        assert _tried(RunView(), world.env, world.env.config, {}) == ()
        world.do("PRUNE", "r0c0")
        assert not world.env.state.slots.living[0].any()
        view = RunView()
        for event in planted:
            view.handle(event)
        (seed,) = _tried(view, world.env, world.env.config, {})
        assert (seed.slot, seed.kept, seed.standing) == ("r0c0", False, "")


def test_a_price_that_the_default_controller_does_not_read_is_refused_with_the_reason() -> (
    None
):
    with pytest.raises(
        esper.ConfigError,
        match=r"price= has no effect on controller heuristic, .*it finds no layer to widen\)",
    ):
        esper.grow(task(), epochs=2, config=config(), price=8)


def test_an_advisor_decides_where_layers_can_be_wider_at_a_price() -> None:
    base = digits()

    def build_host() -> esper.hosts.graft.GraftedHost:
        return esper.graft(model(), {"r2c0": "0 -> 4"})

    widens = esper.Task("mine", 10, build_host, base.train, base.validation, base.test)
    seeds = {}
    for price in (0.0, 1e6):
        grown = esper.grow(
            widens,
            epochs=2,
            config=config(baseline_episodes=1),
            alone=False,
            price=price,
        )
        assert grown.controller == "advisor"
        seeds[price] = grown.seeds
        assert grown.reason.startswith("the advisor expects ")
        (layer,) = grown.layers
        assert layer.name == "0"
        if price:
            assert layer.after == layer.before
            continue
        # A text names layers.
        text = " ".join(repr(grown).split())
        assert f"0: {layer.before} -> {layer.after} units" in text
        assert layer.after == grown.network.get_submodule("host.model.0").out_channels
        assert "in 0 -> 4 (r2c0): planted and merged at epoch 0" in text
        assert grown.reason in text
    assert seeds[1e6] == {}
    assert set(seeds[0.0]) == {"r2c0"}
