"""The registry of blueprints, and the choice of those that a controller may plant."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.config import ConfigError, TrainingConfig, read_toml
from esper.core.action import HEADS
from esper.core.blend import ChannelScale
from esper.core.blueprints import BLUEPRINTS, BlueprintRegistry
from esper.core.ramps import STYLES
from esper.core.stage import SeedStage
from esper.env.planted import PlantedVectorEnv
from esper.env.planted_law import SimParams
from esper.env.vector_env import GrowthVectorEnv
from tests.core_helpers import digits, one_thread, rig, tiny_config

__all__ = ["one_thread"]
S = SeedStage
CNN = BLUEPRINTS.names("cnn")


class Shifted(nn.Module):
    """A user's body: the pixel to the left, scaled."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = ChannelScale(channels, 1, 1)

    def forward(self, h: Tensor) -> Tensor:
        shifted: Tensor = self.scale(h.roll(1, dims=3))
        return shifted


def with_mine() -> BlueprintRegistry:
    registry = BLUEPRINTS.copy()

    @registry.register("cnn", "mine", parameters=lambda c: c)
    def mine(channels: int) -> nn.Module:
        """The pixel to the left; C parameters."""
        return Shifted(channels)

    return registry


@pytest.mark.parametrize("style", STYLES)
def test_a_users_blueprint_can_be_grown_and_kept(style: str) -> None:
    with rig(horizon=10, blueprints=with_mine()) as world:
        spec = world.env.action_spec
        assert spec.blueprints == (*CNN, "mine")
        world.grow("r0c1", S.FOSSILIZED, "mine", style=style)
        slot = world.slot("r0c1")
        site = world.training().site_by_name["r0c1"]
        assert site.planted is not None
        assert (site.planted.blueprint.name, type(site.planted.module.body)) == (
            "mine",
            Shifted,
        )
        assert slot.parameters == 6 + (6 * 8 + 8 + 8 + 1) * (style == "GATED_GATE")
        assert world.value("r0c1/blueprint") == len(CNN) + 1
        assert world.training().fossils() == {"r0c1": site.planted}
    assert "mine" not in BLUEPRINTS.names("cnn")


def test_the_config_says_what_can_be_chosen_and_in_which_order() -> None:
    chosen = ("conv_heavy", "mine", "norm")
    with rig(blueprints=with_mine(), env={"blueprints": chosen}) as world:
        assert world.env.action_spec.blueprints == chosen
        assert world.env.single_action_space.nvec[HEADS.index("blueprint")] == 3
        assert world.info["action_mask"]["slot_blueprint"].shape == (1, 4, 3)
        world.do("GERMINATE", "r1c0", "mine")
        assert world.value("r1c0/blueprint") == 2
        with pytest.raises(ValueError, match="conv_heavy, mine, norm"):
            world.action("GERMINATE", "r0c0", "conv_light")


WRONG = {
    "unknown": (
        ("norm", "conv_ligth"),
        "unknown 'conv_ligth' (did you mean 'conv_light'?)",
    ),
    "of another topology": (
        ("lora",),
        "'lora' fits in no slot (r0c0, r1c0, r0c1, r1c1: it is one for transformer, encoder, mlp, not for cnn)",
    ),
    "of a source": (
        ("lora_2",),
        "'lora_2' fits in no slot "
        "(r0c0, r1c0, r0c1, r1c1: it reads a source (reads_source=True), and the site has none)",
    ),
    "twice": (("norm", "attention", "norm"), "'norm' is given more than once"),
    "none": ((), "it is empty; a run that plants nothing has run.controller = 'none'"),
    "two mistakes": (
        ("x", "norm", "norm"),
        "unknown 'x'; 'norm' is given more than once",
    ),
}


@pytest.mark.finding("H6")
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_choice_lists_the_known_names(case: str) -> None:
    chosen, complaint = WRONG[case]
    config = tiny_config(env={"blueprints": chosen})
    with pytest.raises(ConfigError) as caught:
        GrowthVectorEnv(digits(), config)
    assert (
        str(caught.value)
        == f"env.blueprints: {complaint}; known for cnn hosts: {', '.join(CNN)}"
    )


def test_a_topology_without_blueprints_is_refused() -> None:
    with pytest.raises(ConfigError, match="no blueprint is registered for cnn hosts"):
        GrowthVectorEnv(digits(), tiny_config(), blueprints=BlueprintRegistry())


def test_the_choice_is_written_with_the_run_and_read_back(tmp_path: Path) -> None:
    config = tiny_config(env={"blueprints": ("norm", "mine")})
    (tmp_path / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    again = TrainingConfig.parse(read_toml(tmp_path / "config.toml"))
    assert again == config
    assert again.env.blueprints == ("norm", "mine")
    with pytest.raises(
        ConfigError, match=r"^env\.blueprints: give a list of names, not 3$"
    ):
        TrainingConfig.parse({"env": {"blueprints": 3}})


def test_simulated_hosts_are_limited_to_the_choice_too() -> None:
    """The same law, with the columns of the chosen blueprints, in the chosen order."""
    config = TrainingConfig.parse(
        {"env": {"n_envs": 2, "episode_length": 10, "blueprints": ["oak", "moss"]}}
    )
    env, whole = PlantedVectorEnv(config), SimParams()
    assert env.action_spec.blueprints == ("oak", "moss")
    assert env.law == replace(
        whole,
        blueprints=("oak", "moss"),
        worth=((-4.0, 3.0), (9.0, -3.0), (-5.0, 7.0)),
        parameters=(600, 100),
    )
    env.reset(seed=0)
    assert PlantedVectorEnv(config, env.law).law == env.law
    assert PlantedVectorEnv(TrainingConfig()).law == whole
    wrong = config.with_values(env={"blueprints": ("oak", "norm")})
    with pytest.raises(
        ConfigError,
        match="unknown 'norm'; known for simulated hosts: moss, fern, oak, ivy",
    ):
        PlantedVectorEnv(wrong)


@pytest.mark.parametrize("topology", ["cnn", "transformer", "mlp"])
def test_the_page_about_growing_names_every_blueprint(topology: str) -> None:
    page = (Path(__file__).parents[3] / "docs" / "sites.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith(f"| `{topology}`"))
    assert re.findall(r"`(\w+)`", row.split("|")[3]) == list(BLUEPRINTS.names(topology))


@pytest.mark.finding("H6")
def test_an_unknown_blueprint_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'conv_ligth'") as caught:
        BLUEPRINTS.get("cnn", "conv_ligth")
    assert all(name in str(caught.value) for name in CNN)
    with pytest.raises(ValueError, match="unknown blueprint 'norm' for perceptron"):
        BLUEPRINTS.get("perceptron", "norm")


def test_a_topology_has_each_name_once() -> None:
    registry = BlueprintRegistry()

    def identity(_channels: int) -> nn.Module:
        """Nothing at all.

        More text that is not the description.
        """
        return nn.Identity()

    registry.register("cnn", "own", parameters=lambda _c: 0)(identity)
    registry.register("mlp", "own", parameters=lambda _c: 0)(identity)
    with pytest.raises(ValueError, match="already has a blueprint named 'own'"):
        registry.register("cnn", "own", parameters=lambda _c: 0)(nn.Identity)
    assert registry.names("cnn") == ("own",)
    assert registry.get("cnn", "own").description == "Nothing at all."


def test_a_blueprint_for_an_unknown_topology_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^blueprint own: unknown topology 'mpl' \(did you mean 'mlp'\?\); known: cnn",
    ):
        BlueprintRegistry().register("mpl", "own", parameters=lambda c: c)(nn.Identity)


def test_a_copy_of_the_registry_does_not_see_later_blueprints() -> None:
    registry = BLUEPRINTS.copy()
    registry.register("cnn", "later", parameters=lambda _c: 0)(lambda _c: nn.Identity())
    assert "later" in registry.names("cnn")
    assert "later" not in BLUEPRINTS.names("cnn")
    assert "later" not in BLUEPRINTS.copy().names("cnn")


def code_of(file: str, made: nn.Module) -> dict[str, Any]:
    """Runs a file that defines a function, a class and a factory of functions, all called body."""
    scope: dict[str, Any] = {"made": made, "__name__": file}
    exec(
        "def body(channels): return made\n"
        "class Bodies:\n    def body(self, channels): return made\n"
        "def factory():\n    def body(channels): return made\n    return body\n",
        scope,
    )
    return scope


def test_a_blueprint_is_replaced_when_its_code_runs_again_and_by_nothing_else() -> None:
    registry = BlueprintRegistry()
    register = registry.register("cnn", "body", parameters=lambda channels: 0)
    for made in (nn.Identity(), nn.ReLU()):
        register(code_of("a_file", made)["body"])
    assert registry.names("cnn") == ("body",)
    assert isinstance(registry.get("cnn", "body").build(1), nn.ReLU)
    again, other = code_of("a_file", nn.Tanh()), code_of("another_file", nn.Tanh())
    for build in (
        other["body"],
        again["factory"](),
        again["Bodies"]().body,
        lambda channels: nn.Tanh(),
    ):
        with pytest.raises(
            ValueError, match="cnn already has a blueprint named 'body'"
        ):
            register(build)
    made_twice = registry.register("cnn", "made", parameters=lambda channels: 0)
    made_twice(again["factory"]())
    with pytest.raises(ValueError, match="already has a blueprint named 'made'"):
        made_twice(again["factory"]())


@pytest.mark.parametrize("names", ["conv_light", ["conv_light"], {"conv_light"}])
def test_names_in_place_of_a_registry_are_refused_with_where_names_go(
    names: Any,
) -> None:
    with pytest.raises(ConfigError, match=r'config=\{"env": \{"blueprints"'):
        BLUEPRINTS.copy_of(names)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="expected a BlueprintRegistry"):
        esper.Grower(model, ["0 -> 2"], optimizer, blueprints=names)
    with pytest.raises(ConfigError, match="expected a BlueprintRegistry"):
        esper.find_sites(model, torch.zeros(2, 3), names)
