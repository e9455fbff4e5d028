"""Arms as a user names them: the config of each, and which arms cannot be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from esper.compare.arms import Arm, read_arms
from esper.config import ConfigError


def arms(
    *texts: str, base: dict[str, Any] | None = None, control_of: str | None = None
) -> dict[str, Arm]:
    return {arm.name: arm for arm in read_arms(texts, base or {}, control_of)}


def refused(*texts: str, base: dict[str, Any] | None = None) -> str:
    with pytest.raises(ConfigError) as found:
        read_arms(texts, base or {})
    return str(found.value)


def test_short_names_are_controllers_under_the_common_config() -> None:
    found = arms(
        "none",
        "heuristic",
        "schedule:a=b.toml",
        "checkpoint:runs/a",
        base={"run": {"seed": 3}},
    )
    assert [arm.controller for arm in found.values()] == list(found)
    assert {arm.config.run.seed for arm in found.values()} == {3}
    assert [arm.alone for arm in found.values()] == [True, False, False, False]


def test_ppo_is_read_from_a_run_folder() -> None:
    assert arms("ppo:runs/long")["ppo"].controller == "checkpoint:runs/long"


def test_an_arm_may_learn_with_values_of_its_own() -> None:
    found = arms(
        "ppo",
        "ppo:reward.mode=sparse,ppo.gamma=0.9,run.rounds=3",
        "mine:controller=ppo,ppo.width=8",
        "none",
    )
    assert [arm.learns for arm in found.values()] == [True, True, True, False]
    sparse = found["ppo:reward.mode=sparse,ppo.gamma=0.9,run.rounds=3"].config
    assert (
        sparse.run.controller,
        sparse.reward.mode,
        sparse.ppo.gamma,
        sparse.run.rounds,
    ) == ("ppo", "sparse", 0.9, 3)
    assert found["mine"].config.ppo.width == 8


def test_a_controller_with_values_is_named_by_all_of_it() -> None:
    found = arms(
        "heuristic", "heuristic:env.max_seeds=1", base={"run": {"controller": "random"}}
    )
    assert [arm.controller for arm in found.values()] == ["heuristic", "heuristic"]
    assert found["heuristic:env.max_seeds=1"].config.env.max_seeds == 1


def test_a_run_folder_may_have_an_equals_sign_in_its_name() -> None:
    assert arms("ppo:runs/width=8")["ppo"].controller == "checkpoint:runs/width=8"


def test_an_arm_sets_values_of_its_own() -> None:
    text = 'mine:controller=heuristic,task.learning_rate=0.01,env.blueprints=["norm","attention"],env.gates.level=strict'
    config = arms(text, "none", base={"env": {"max_seeds": 2}})["mine"].config
    assert (config.run.controller, config.task.learning_rate, config.env.max_seeds) == (
        "heuristic",
        0.01,
        2,
    )
    assert (config.env.blueprints, config.env.gates.level) == (
        ("norm", "attention"),
        "strict",
    )
    assert arms(text, "none")["none"].config.task.learning_rate is None


def test_a_controller_in_quotes_is_the_same() -> None:
    assert arms('mine:controller="random"', "none")["mine"].controller == "random"


def test_an_arm_has_its_config_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[run]\ncontroller = "random"\nrounds = 7\n[env]\nmax_seeds = 1\n')
    found = arms(f"mine={file}", "none", base={"task": {"momentum": 0.5}})
    assert (found["mine"].controller, found["mine"].config.env.max_seeds) == (
        "random",
        1,
    )
    assert (found["mine"].config.task.momentum, found["none"].config.env.max_seeds) == (
        0.5,
        3,
    )


def test_shared_values_of_one_arm_apply_to_all_arms(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.toml").write_text(
            '[run]\ncontroller = "random"\n[task]\nname = "chars"\n'
        )
    found = arms(f"a={tmp_path / 'a.toml'}", f"b={tmp_path / 'b.toml'}", "none")
    assert {arm.config.task.name for arm in found.values()} == {"chars"}


@pytest.mark.finding("M14")
@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ("task.name=chars", "the same hosts on the same data"),
        ("task.data=elsewhere", "the same data"),
        ("run.seed=4", "the initial weights and the batches"),
        ("env.n_envs=4", "which hosts form a pair"),
        ("run.device=cuda", "devices round differently"),
    ],
)
def test_values_that_make_pairs_meaningless_are_refused_with_the_reason(
    values: str, reason: str
) -> None:
    base = {
        "task": {"name": "digits", "data": "here"},
        "run": {"seed": 3, "device": "cpu"},
        "env": {"n_envs": 2},
    }
    message = refused("none", f"mine:controller=random,{values}", base=base)
    assert reason in message
    assert values.partition("=")[0] in message
    assert "arm 'mine'" in message
    assert reason in refused(
        f"a:controller=random,{values}", f"b:controller=none,{_other(values)}"
    )


def _other(values: str) -> str:
    key = values.partition("=")[0]
    return f"{key}={'9' if key in ('run.seed', 'env.n_envs') else 'another'}"


@pytest.mark.finding("M15")
def test_the_reward_mode_of_an_arm_is_validated_with_its_config() -> None:
    message = refused("none", "mine:controller=random,reward.mode=greedy")
    assert message.startswith("arm 'mine': reward.mode")
    assert "'sparse', 'loss_shaped', 'loss_sparse' or 'priced'" in message
    one = {"env": {"baseline_episodes": 1}}
    message = refused(
        "none", "mine:controller=random,reward.mode=loss_shaped", base=one
    )
    assert message.startswith("arm 'mine': reward.mode = 'loss_shaped'")
    assert "baseline_episodes must be 2 or more" in message
    fits = arms(
        "none",
        "mine:controller=random,reward.mode=loss_shaped,env.baseline_episodes=2",
        base=one,
    )
    assert fits["mine"].config.reward.mode == "loss_shaped"


def test_a_control_inherits_the_values_of_its_arm() -> None:
    slow = "slow:controller=heuristic,task.learning_rate=0.01"
    found = arms(
        "none",
        "static",
        slow,
        "quick:controller=static,task.learning_rate=0.2",
        "random",
    )
    assert {name: arm.control_of for name, arm in found.items()} == {
        **dict.fromkeys(("none", "slow", "random")),
        **dict.fromkeys(("static", "quick"), "slow"),
    }
    assert [
        found[name].config.task.learning_rate for name in ("static", "quick", "none")
    ] == [0.01, 0.2, None]
    assert (
        arms("random", "heuristic", "bigger", control_of="heuristic")[
            "bigger"
        ].control_of
        == "heuristic"
    )
    assert (
        arms(
            "random",
            "heuristic",
            "b:controller=bigger,of=heuristic",
            control_of="random",
        )["b"].control_of
        == "heuristic"
    )


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("none", "static"), "static is made for an arm that grows hosts: add one"),
        (
            ("none", "random", "s:controller=static,of=none"),
            "'none' is not one; these arms do: random",
        ),
        (
            ("none", "random", "r:controller=random,of=random"),
            "of= applies only to static, bigger, same-compute",
        ),
        (
            ("none", "nope"),
            "unknown controller 'nope' (did you mean 'none'?); an arm is one of: none, static, bigger",
        ),
        (("none", "a=b"), "b is not a .toml file"),
        (("none", "a=gone.toml"), "gone.toml does not exist"),
        (("none", "a:env.max_seeds=1"), "arm 'a' has no controller; give it one of"),
        (
            ("none", "a:controller=random,max_seeds=1"),
            "of=... or SECTION.KEY=VALUE, got 'max_seeds=1'",
        ),
        (
            ("none", "a:controller=random,run.rounds=1"),
            "run.rounds has no effect here: --pairs",
        ),
        (
            ("none", "a:controller=random,ppo.width=1"),
            "ppo.width has no effect here: this arm does not learn",
        ),
        (
            ("none", "a:controller=ppo,run.evaluation_pairs=1"),
            "run.evaluation_pairs has no effect here: --pairs",
        ),
        (("none", "ppo:rewards.mode=sparse"), "unknown key rewards"),
        (("none", "a:controller=random,env.x=1"), "arm 'a': unknown key env.x"),
        (
            ("none", "a:controller=random", "a:controller=none"),
            "two arms have the same name",
        ),
    ],
)
def test_a_refusal_says_what_would_be_right(
    texts: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # another test of this process may have registered more
    monkeypatch.setattr(
        "esper.compare.arms.CONTROL_NAMES", ["static", "bigger", "same-compute"]
    )
    assert message in refused(*texts)
