"""A comparison as a whole: fair, the same whatever the order, and never lost."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esper.compare.arms import read_arms
from esper.compare.comparison import ComparisonResult
from esper.compare.comparison_run import ComparisonRun
from esper.compare.runner import GrowingRunner
from esper.config import ConfigError, TrainingConfig
from esper.env.make import EnvMaker
from esper.run.experiment import Experiment
from esper.telemetry.event import ArmPlayed
from tests.run.rank_helpers import ranks_of
from tests.selection import slow_except

ARMS = (
    "none",
    "random",
    "heuristic",
    "few:controller=heuristic,env.max_seeds=1,reward.mode=sparse",
)
PLANTED: dict[str, Any] = {
    "task": {"name": "planted"},
    "env": {"n_envs": 2, "episode_length": 5},
    "run": {"seed": 4},
}
DIGITS: dict[str, Any] = {
    "task": {"samples_per_epoch": 64},
    "env": {"n_envs": 2, "episode_length": 2, "baseline_episodes": 1},
}


def compare(
    folder: Path,
    *texts: str,
    base: dict[str, Any] = PLANTED,
    pairs: int = 4,
    progress: Callable[[ArmPlayed], None] | None = None,
    order_seed: int = 0,
) -> ComparisonRun:
    return ComparisonRun(
        read_arms(texts or ARMS, base),
        pairs,
        folder,
        progress=progress,
        order_seed=order_seed,
    )


def values(result: ComparisonResult | None) -> dict[str, Any]:
    """Every host of every arm; as text, since no number is equal to NaN."""
    assert result is not None
    return {
        name: [repr(host) for host in hosts] for name, hosts in result.hosts.items()
    }


@pytest.mark.finding("M14")
@pytest.mark.parametrize(
    "base", slow_except([PLANTED], [PLANTED, DIGITS]), ids=["simulated", "trained"]
)
def test_no_number_depends_on_the_order_of_arms(
    base: dict[str, Any], tmp_path: Path
) -> None:
    names = ("none", "random", "heuristic")
    orders, found = [], []
    for number, texts in enumerate((names, names[::-1])):
        events: list[ArmPlayed] = []
        comparison = compare(
            tmp_path / str(number),
            *texts,
            base=base,
            progress=events.append,
            order_seed=number,
        )
        found.append(values(comparison.run()))
        orders.append([event.controller for event in events])
    assert orders[0] != orders[1]
    assert found[0] == found[1]


def test_results_json_has_the_config_the_values_and_the_statistics_of_arms(
    tmp_path: Path,
) -> None:
    compare(tmp_path / "a", "none", ARMS[-1]).run()
    told = json.loads((tmp_path / "a" / "results.json").read_text())
    assert told["pairs"] == told["pairs_asked"] == 4
    assert set(told["arms"]) == {"none", "few"}
    assert [metric["metric"] for metric in told["metrics"]][:2] == [
        "test_accuracy",
        "validation_loss",
    ]
    few = told["arms"]["few"]
    assert (few["config"]["env"]["max_seeds"], few["config"]["reward"]["mode"]) == (
        1,
        "sparse",
    )
    (comparison,) = told["metrics"][0]["comparisons"]
    assert comparison["mean_a"] == pytest.approx(
        sum(few["values"]["test_accuracy"]) / 4
    )
    keys = {
        "difference",
        "interval",
        "p_value",
        "adjusted_p",
        "mann_whitney_u",
        "verdict",
        "iqm_difference",
    }
    assert keys <= set(comparison)


@pytest.mark.slow
def test_arms_with_their_own_rates_have_their_own_baselines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured: list[float | None] = []
    from esper.env import vector_env

    real = vector_env.measure_baseline

    def counting(task: Any, config: Any, *rest: Any) -> Any:
        measured.append(config.task.learning_rate)
        return real(task, config, *rest)

    monkeypatch.setattr(vector_env, "measure_baseline", counting)
    compare(
        tmp_path / "o",
        "random",
        "slow:controller=random,task.learning_rate=0.01",
        base=DIGITS,
    ).run()
    assert sorted(rate or 0 for rate in measured) == [0.01, 0.4]


def stop_at(number: int, error: BaseException) -> Callable[[ArmPlayed], None]:
    """Ends the comparison when that many rounds of arms were played."""
    count = [0]

    def listen(_event: ArmPlayed) -> None:
        count[0] += 1
        if count[0] == number:
            raise error

    return listen


def test_finished_rounds_are_kept_and_the_rest_can_be_resumed(tmp_path: Path) -> None:
    whole = compare(tmp_path / "whole", pairs=6).run()
    cut = compare(
        tmp_path / "cut", pairs=6, progress=stop_at(6, OSError("the disk is gone"))
    )  # four arms: in the second of three rounds
    with pytest.raises(OSError, match="the disk is gone"):
        cut.run()
    assert cut.result is not None
    assert (cut.result.pairs, cut.result.requested_pairs) == (2, 6)
    assert json.loads((tmp_path / "cut" / "results.json").read_text())["pairs"] == 2
    for name, hosts in values(cut.result).items():
        assert hosts == values(whole)[name][:2]

    events: list[ArmPlayed] = []
    resumed = ComparisonRun.resume(tmp_path / "cut", events.append).run()
    assert len(events) == 3 * 4 - 6  # nothing is played twice
    assert values(resumed) == values(whole)


def test_sigterm_acts_like_ctrl_c_and_a_truncated_round_is_played_again(
    tmp_path: Path,
) -> None:
    whole = compare(tmp_path / "whole", "none", "random").run()
    played: list[ArmPlayed] = []

    def terminates(event: ArmPlayed) -> None:
        played.append(event)
        if len(played) == 3:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        compare(tmp_path / "o", "none", "random", progress=terminates).run()
    file = tmp_path / "o" / "played.jsonl"
    file.write_bytes(file.read_bytes()[:-40])
    events: list[ArmPlayed] = []
    assert values(ComparisonRun.resume(tmp_path / "o", events.append).run()) == values(
        whole
    )
    assert len(events) == 2


def test_a_finished_comparison_can_be_reported_against_another_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compare(tmp_path / "o").run()

    def never(self: GrowingRunner, number: int, grown: Any = ()) -> Any:
        raise AssertionError("nothing is left to play")

    monkeypatch.setattr(GrowingRunner, "play", never)
    again = ComparisonRun.resume(tmp_path / "o", reference="random").run()
    assert values(again) == values(first)
    assert set(again.metrics[0].comparisons) == {"none", "heuristic", "few"}
    ours, theirs = (
        first.metrics[0].comparisons["random"].pair,
        again.metrics[0].comparisons["none"].pair,
    )
    assert ours.difference == -theirs.difference
    with pytest.raises(
        ConfigError,
        match="must be one of the arms none, random, heuristic, few; got 'nope'",
    ):
        ComparisonRun.resume(tmp_path / "o", reference="nope")


SEED = '[[action]]\nepoch = 0\nop = "GERMINATE"\nslot = "r0c0"\nblueprint = "fern"\n'


def write_what_is_followed(kind: str, seed: int) -> str:
    """Writes a schedule or a run into the working directory; returns the controller that follows it."""
    if kind == "schedule":
        Path("s.toml").write_text(SEED if seed == 4 else SEED.replace("fern", "moss"))
        return "schedule:s.toml"
    if kind == "pretrained":
        return kind
    shutil.rmtree("r", ignore_errors=True)
    config = TrainingConfig.parse(PLANTED).with_values(
        run={
            "controller": "ppo",
            "rounds": 1,
            "seed": seed,
            "evaluation_pairs": 0,
        },
        ppo={"width": 8, "update_epochs": 1, "n_minibatches": 1},
    )
    Experiment(config, Path("r")).run()
    return f"{kind}:r"


@pytest.mark.parametrize(
    "kind",
    slow_except(["schedule"], ["schedule", "checkpoint", "pretrained"]),
)
def test_a_comparison_follows_what_it_began_with_from_anywhere(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    controller = write_what_is_followed(kind, seed=4)
    whole = compare(Path("whole"), "none", controller).run()
    cut = compare(
        Path("cut"),
        "none",
        f"named:controller={controller}",
        controller,
        progress=stop_at(3, OSError("no")),
    )
    with pytest.raises(OSError, match="no"):
        cut.run()
    write_what_is_followed(kind, seed=5)  # another one takes its place
    shutil.move("cut", tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    shutil.rmtree("here")
    found = ComparisonRun.resume("moved").run()
    assert list(found.hosts) == ["none", "named", controller]
    for name in ("named", controller):
        assert values(found)[name] == values(whole)[controller]
    saved = json.loads(Path("moved", "comparison.json").read_text())["arms"]
    assert [arm["controller"] for arm in saved] == ["none", controller, controller]


def test_a_damaged_copy_prevents_resuming(tmp_path: Path) -> None:
    schedule = tmp_path / "s.toml"
    schedule.write_text(SEED)
    compare(tmp_path / "o", "none", f"schedule:{schedule}", pairs=2).run()
    [copy] = (tmp_path / "o" / "followed").iterdir()
    copy.write_text(SEED.replace("fern", "moss"))
    with pytest.raises(ConfigError, match="has changed since the comparison began"):
        ComparisonRun.resume(tmp_path / "o")


def test_a_folder_that_is_not_empty_or_not_a_comparison_is_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("dear diary")
    with pytest.raises(ConfigError, match="is not empty; give a new"):
        compare(tmp_path)
    with pytest.raises(ConfigError, match="is not the folder of a comparison"):
        ComparisonRun.resume(tmp_path)


def test_a_loss_that_is_not_finite_gives_no_verdict(tmp_path: Path) -> None:
    """Leaving such pairs out would leave out those in which an arm went wrong."""
    compare(tmp_path / "o", "none", "random").run()
    file = tmp_path / "o" / "played.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for entry in lines:
        if entry["arm"] == "random" and entry["round"] == 0:
            entry["hosts"][0]["loss"] = "nan"
    file.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    loss = ComparisonRun.resume(tmp_path / "o").run().metrics[1]
    assert loss.missing == "no verdict: some values are not finite (random 1 of 4)"
    assert not loss.comparisons


def test_fewer_than_one_training_seed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train_seeds is 0; give 1 or more"):
        ComparisonRun(
            read_arms(("ppo", "none"), PLANTED), 2, tmp_path / "o", train_seeds=0
        )
    assert not (tmp_path / "o").exists()


@pytest.mark.slow
def test_every_arm_is_set_up_for_the_devices_of_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config of a run names the GPUs of all ranks; without its ranks, a maker would use those of others, too."""
    makes, seen = EnvMaker.of, []

    def noted(
        config: TrainingConfig, task: Any = None, ranks: Any = None, **rest: Any
    ) -> EnvMaker:
        seen.append(ranks)
        return makes(config, task, ranks, **rest)

    with ranks_of(2) as ranks:
        monkeypatch.setattr(EnvMaker, "of", noted)
        ComparisonRun(
            read_arms(("random", "none"), DIGITS), 2, tmp_path / "o", ranks=ranks
        ).close()
    assert len(seen) > 2
    assert all(each is ranks for each in seen)
