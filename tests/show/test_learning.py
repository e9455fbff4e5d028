"""Charts of rewards and of what an agent learned from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from esper.show import learning
from esper.show.charts import Line
from esper.show.learning import (
    policy_section,
    reward_section,
    terms_by_epoch,
    terms_by_round,
)
from esper.show.read import Run, open_run
from esper.telemetry.event import (
    AgentValidated,
    EpochCompleted,
    PolicyUpdated,
    PracticeRound,
    RoundCompleted,
)
from tests.show.page_helpers import fed
from tests.show.test_curves import run_of
from tests.telemetry.sample_events import started

Drawn = dict[str, list[Line]]
Copy = Callable[..., Path]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """The lines of each chart that is made, by its title."""
    found: Drawn = {}

    def keep(
        title: str, _words: str, lines: list[Line], *_: object, **__: object
    ) -> str:
        found[title] = list(lines)
        return f"<figure>{title}</figure>"

    monkeypatch.setattr(learning, "line_figure", keep)
    return found


def with_terms(env: int, episode: int, number: int, **terms: float) -> EpochCompleted:
    return EpochCompleted(
        env, episode, number, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1, 0, {}, {}, 0.0, terms
    )


def test_reward_terms_are_summed_over_an_episode_and_averaged_over_hosts(
    drawn: Drawn,
) -> None:
    run = run_of(
        with_terms(0, 0, 1, gain=1.0, rent=-0.5),
        with_terms(0, 0, 2, gain=2.0),
        with_terms(1, 0, 1, gain=5.0),
        with_terms(0, 1, 1, gain=float("nan"), rent=-2.0),
    )
    terms_by_round(run)
    gain, rent = drawn["Reward terms by round"]
    assert (gain.name, list(gain.x), list(gain.y)) == ("gain", [1, 2], [4.0, 0.0])
    assert (rent.name, list(rent.y)) == ("rent", [-0.25, -2.0])


def test_a_round_in_progress_is_left_out_once_one_is_complete(
    grown: Path, copy: Copy, drawn: Drawn
) -> None:
    dropped = {"RoundCompleted", "EpisodeCompleted", "RunCompleted"}
    folder = copy(
        grown, lambda e: None if e["event"] in dropped and e.get("round", 2) == 2 else e
    )
    run = open_run(folder)
    assert [e.round for e in run.of(RoundCompleted)] == [1]
    terms_by_round(run)
    assert all(list(line.x) == [1] for line in drawn["Reward terms by round"])


def test_without_reward_terms_it_says_so() -> None:
    assert "No reward terms were logged." in terms_by_round(run_of())


def test_terms_by_epoch_are_means_over_hosts(drawn: Drawn) -> None:
    terms_by_epoch(
        run_of(
            with_terms(0, 0, 1, gain=1.0),
            with_terms(1, 0, 1, gain=4.0),
            with_terms(0, 0, 2, gain=3.0),
        )
    )
    (line,) = drawn["Reward terms by epoch"]
    assert (list(line.x), list(line.y)) == ([1, 2], [2.5, 3.0])


def test_returns_have_a_line_for_each_run_in_its_colour(
    grown: Path, learned: Path, drawn: Drawn
) -> None:
    one, two = open_run(grown, "one"), open_run(learned, "two")
    html = reward_section([one, two])
    lines = drawn["Return by round"]
    assert [line.name for line in lines] == ["one", "two"]
    assert [list(line.y) for line in lines] == [
        [e.mean_return for e in run.of(RoundCompleted)] for run in (one, two)
    ]
    assert html.index("<h3>one</h3>") < html.index("<h3>two</h3>")
    reward_section([one])
    assert [line.name for line in drawn["Return by round"]] == ["return"]


def test_updates_of_the_agent_are_drawn_by_round(learned: Path, drawn: Drawn) -> None:
    run = open_run(learned)
    updates = run.of(PolicyUpdated)
    policy_section([run])
    for title, field in (
        ("Policy entropy", "entropy"),
        ("Explained variance", "explained_variance"),
    ):
        (line,) = drawn[title]
        assert list(line.y) == [getattr(update, field) for update in updates]
    heads = drawn[f"{run.name}: entropy of each head"]
    assert {line.name for line in heads} == {
        name for update in updates for name in update.head_entropies
    }
    assert [list(line.y) for line in drawn["Return on validation hosts"]] == [
        [e.mean_return for e in run.of(AgentValidated)]
    ]
    assert [len(line.y) for line in drawn[f"{run.name}: practice"]] == [
        len(run.of(PracticeRound))
    ]


def test_the_limit_of_the_divergence_is_drawn_if_runs_share_it(
    learned: Path, drawn: Drawn
) -> None:
    one, two = open_run(learned, "one"), open_run(learned, "two")
    policy_section([one, two])
    limit = drawn["KL divergence"][-1]
    assert limit.reference
    assert set(limit.y) == {one.value("ppo", "target_kl") * one.value("ppo", "kl_stop")}
    two.config = {**two.config, "ppo": {**two.config["ppo"], "target_kl": 0.5}}
    policy_section([one, two])
    assert [line.name for line in drawn["KL divergence"]] == ["one", "two"]


def test_without_updates_the_reason_is_given(grown: Path, tmp_path: Path) -> None:
    assert "the controller does not learn" in policy_section([open_run(grown)])
    young = fed(Run(tmp_path, "young"), started())
    assert "the controller has not learned from a round yet" in policy_section([young])
