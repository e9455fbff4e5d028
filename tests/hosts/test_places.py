"""Layouts of sites are found, and seeds work on features of each: in envs, in custom loops, and afterwards."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import esper
from esper.agents.script import ScheduleEntry, ScriptedController
from esper.core.action import Op
from esper.data.task import Task
from esper.env.make import EnvMaker
from esper.files.grown_host import committed_network, export, load_host
from esper.hosts.seed_state import add_seeds, take_seeds
from tests.grower.loops import LENIENT, do, plant, script
from tests.hosts.layout_models import CASES, CLASSES, Case, made
from tests.selection import slow_except

GROWS = {
    1: do(Op.ADVANCE, "r0c0"),
    4: do(Op.ADVANCE, "r0c0"),
    8: do(Op.ADVANCE, "r0c0"),
    9: do(Op.FOSSILIZE, "r0c0"),
}
SEEDS = {
    "cnn": "conv_light",
    "cnn1d": "conv_light",
    "cnn3d": "conv_light",
    "mlp": "mlp_small",
}
SEEDS |= {"transformer": "attention", "encoder": "attention"}


@pytest.mark.parametrize("name", CASES)
def test_the_layout_of_each_site_is_found(name: str) -> None:
    model, case = made(name)
    host = esper.graft(model, case.sites, example=case.inputs(5))
    by_name = {place.name: (place.topology, place.order) for place in host.sites}
    assert (
        tuple(by_name[f"r0c{number}"] for number in range(len(case.sites)))
        == case.found
    )


def data_of(case: Case) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return case.inputs(20), torch.arange(20) % CLASSES


def grown(
    model: nn.Module, case: Case, blueprint: str, epochs: int = 12
) -> esper.Grower:
    """Trains ``model`` and keeps a seed in its first slot."""
    x, y = data_of(case)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    controller = script({0: plant("r0c0", blueprint), **GROWS})
    grower = esper.Grower(
        model, list(case.sites), optimizer, controller, epochs, config=LENIENT
    )

    def accuracy(network: nn.Module) -> Any:
        network.eval()
        with torch.no_grad():
            return (network(x).argmax(1) == y).float()

    for _ in range(epochs):
        model.train()
        for rows in torch.arange(20).split(5):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        grower.step(accuracy)
    return grower


@pytest.mark.parametrize(
    "name", slow_except(("channels last", "recurrent, time first"), CASES)
)
def test_a_seed_grows_in_a_loop_and_stays_with_the_same_outputs(name: str) -> None:
    model, case = made(name)
    blueprint = SEEDS[case.found[0][0]]
    grower = grown(model, case, blueprint)
    assert list(grower.kept.values()) == [blueprint]
    x = data_of(case)[0]
    before = model.eval()(x)
    grower.finish()
    torch.testing.assert_close(model.eval()(x), before, rtol=0, atol=0)
    assert not torch.equal(before, made(name)[0].eval()(x))
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))(x), before)
    torch.testing.assert_close(esper.plain(model, x[:4])(x), before)
    state = model.state_dict()
    add_seeds(model, state)
    other = made(name)[0].eval()
    take_seeds(other, state, make=True)
    other.load_state_dict(state)
    torch.testing.assert_close(other.eval()(x), before)


def test_a_loop_that_is_resumed_knows_the_layouts() -> None:
    model, case = made("time first")
    grower = grown(model, case, "attention", epochs=3)
    other = copy.deepcopy(made("time first")[0])
    again = esper.Grower(
        other,
        list(case.sites),
        torch.optim.SGD(other.parameters(), 0.05),
        horizon=3,
        config=LENIENT,
    )
    again.load_state_dict(_of_rule(grower))
    assert again.hooks.sites["r0c0"].place.order == (1, 0, 2)


def _of_rule(grower: esper.Grower) -> dict[str, Any]:
    """The state of ``grower``, as if the rule had played."""
    state = grower.state_dict()
    return {
        **state,
        "arguments": {**state["arguments"], "controller": "heuristic"},
        "controller": {
            "episode": [0],
            "steps": [3],
            "own": {"kept": [[]], "failed": [[]]},
        },
    }


@pytest.mark.parametrize(
    "name",
    ["channels last", pytest.param("a stem and an encoder", marks=pytest.mark.slow)],
)
def test_an_env_grows_hosts_of_any_layout_and_saves_them(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    x, y = data_of(case)
    split = esper.Split(x, y)
    task = Task(
        name="mine",
        classes=CLASSES,
        build_host=lambda: esper.graft(CASES[name].make(), case.sites),
        train=split,
        validation=split,
        test=split,
        batch_size=10,
        n_envs=1,
        episode_length=12,
    )
    config = LENIENT.with_values(
        env={"n_envs": 1, "episode_length": 12, "baseline_episodes": 1}
    )
    blueprint = SEEDS[case.found[0][0]]
    schedule = [
        ScheduleEntry(
            epoch=0, op="GERMINATE", slot="r0c0", blueprint=blueprint, tempo=3
        )
    ]
    schedule += [
        ScheduleEntry(epoch=0, op=op, slot="r0c0")
        for op in ("ADVANCE", "ADVANCE", "ADVANCE", "FOSSILIZE")
    ]
    env = EnvMaker(config, task).make()
    controller = ScriptedController(schedule, env.action_spec, env.layout, 1)
    observation, info = env.reset(seed=0)
    controller.begin()
    while not env.done.all():
        observation, *_, info = env.step(
            controller.act(observation, info["action_mask"])
        )
    assert env.state.slots.fossil.any()
    training = env.host(0)
    network = committed_network(training)
    export(network, tmp_path / "host")
    loaded = load_host(tmp_path / "host", model=CASES[name].make())
    torch.testing.assert_close(loaded(x), network(x))
    env.close()


def test_samples_that_cannot_be_told_from_positions_are_refused() -> None:
    model, case = made("time first")
    with pytest.raises(
        esper.ConfigError, match=r"\[?\(?7, 7, 8\)?.*which dimension are the samples"
    ):
        esper.graft(model, case.sites, example=torch.randint(0, 11, (7, 7)))


def test_what_is_declared_wins_and_is_checked() -> None:
    model, case = made("causal")
    host = esper.graft(model, case.sites, "encoder", example=case.inputs(5))
    assert host.sites[0].topology == "encoder"
    with pytest.raises(esper.ConfigError, match="4 dimensions"):
        esper.graft(model, case.sites, "cnn", example=case.inputs(5))


class Square(nn.Module):
    """As many channels as columns, and layers of both kinds before a site."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix, self.last = (
            nn.Conv2d(1, 8, 3, padding=1),
            nn.Linear(8, 8),
            nn.Identity(),
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.last(self.mix(self.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
        return self.head(h.mean((2, 3)))  # type: ignore[no-any-return]


def test_channels_that_cannot_be_told_from_columns_are_refused_unless_a_layer_has_just_returned_them() -> (
    None
):
    square, wide = torch.randn(3, 1, 8, 8), torch.randn(3, 1, 8, 10)
    with pytest.raises(esper.ConfigError, match="which dimension are the channels"):
        esper.graft(Square(), ["last"], example=square)
    assert esper.graft(Square(), ["last"], "cnn", example=square).sites[0].order == ()
    assert esper.graft(Square(), ["last"], example=wide).sites[0].order == ()
    assert esper.graft(Square(), ["mix"], example=square).sites[0].order == (0, 3, 1, 2)


class NormsOnly(nn.Module):
    """Each position sees the mean of all; what follows is normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.norm = (
            nn.Embedding(11, 8),
            nn.LayerNorm(8),
            nn.LayerNorm(8),
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(self.embed(x))
        return self.head(self.norm(h + h.mean(1, keepdim=True)).mean(1))  # type: ignore[no-any-return]


def test_a_change_that_a_normalisation_follows_is_seen() -> None:
    torch.manual_seed(0)
    host = esper.graft(NormsOnly(), ["block"], example=torch.randint(0, 11, (5, 7)))
    assert host.sites[0].topology == "encoder"
