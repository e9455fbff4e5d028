"""Fates of the seeds of each blueprint, from events."""

from __future__ import annotations

import pickle
from dataclasses import replace

from esper.telemetry.analytics import BlueprintAnalytics, BlueprintRow
from esper.telemetry.event import (
    ActionTaken,
    EpisodeCompleted,
    Event,
    StageChanged,
)
from tests.telemetry import sample_events as samples

LIFE = ("GERMINATED", "TRAINING", "BLENDING", "HOLDING", "FOSSILIZED")


def change(
    after: str,
    epoch: int,
    blueprint: str = "norm",
    slot: str = "r0c0",
    cause: str = "",
    **host: int,
) -> Event:
    place = {"env": 0, "episode": 0, **host}
    return StageChanged(
        epoch=epoch,
        slot=slot,
        blueprint=blueprint,
        before="",
        after=after,
        cause=cause,
        **place,
    )


def epoch(
    number: int,
    contributions: dict[str, float] | None = None,
    fossils: int = 0,
    env: int = 0,
    episode: int = 0,
) -> Event:
    measured = contributions or {}
    made = samples.epoch(env, number, episode)
    return replace(made, contributions=measured, fossil_parameters=fossils)


def ended(epochs: int) -> EpisodeCompleted:
    numbers = (0.0, 0.0, 0.0, 0.0, 277, 0, {}, 0, True, {})
    return EpisodeCompleted(0, 0, epochs, *numbers)


def refused(blueprint: str | None, slot: str = "r0c0") -> ActionTaken:
    return ActionTaken(
        env=0,
        episode=0,
        epoch=1,
        op="ADVANCE",
        slot=slot,
        blueprint=blueprint,
        accepted=False,
        reason="G2",
    )


def told(*events: Event) -> BlueprintAnalytics:
    analytics = BlueprintAnalytics()
    for event in events:
        analytics.handle(event)
    analytics.close()
    return analytics


def only(analytics: BlueprintAnalytics) -> BlueprintRow:
    (row,) = analytics.rows()
    return row


def kept(
    slot: str = "r0c0", blueprint: str = "norm", born: int = 0, at: int = 4
) -> list[Event]:
    """A seed that is planted at ``born`` and kept at ``at``, worth 1.5 pp then and 9 pp later, with 40 parameters."""
    before = [
        *(change(stage, born, blueprint, slot) for stage in LIFE[:-1]),
        epoch(at, {slot: 1.5}),
    ]
    return [
        *before,
        change("FOSSILIZED", at, blueprint, slot),
        epoch(at + 1, {slot: 9.0}, fossils=40),
    ]


def test_a_seed_that_is_kept() -> None:
    row = only(told(*kept(), ended(10)))
    assert row == BlueprintRow("norm", 1, 1, 1, 0, 0, 0, 0, 0, 1.5, None, 10.0, 40.0)


def test_a_seed_that_is_pruned_has_the_contribution_it_had_then() -> None:
    life = [change("GERMINATED", 2), change("TRAINING", 2), change("BLENDING", 3)]
    analytics = told(
        *life,
        epoch(4, {"r0c0": -0.5}),
        epoch(5, {"r0c0": -2.0}),
        change("PRUNED", 6, cause="faded"),
    )
    assert only(analytics) == BlueprintRow(
        "norm", 1, 1, 0, 1, 0, 0, 0, 0, None, -2.0, 4.0, None
    )


def test_a_seed_that_is_cut_and_one_that_was_rolled_back() -> None:
    events = []
    for slot, cause in (("r0c0", "not finite"), ("r0c1", "rollback")):
        events += [
            change("GERMINATED", 0, slot=slot),
            change("PRUNED", 3, slot=slot, cause=cause),
        ]
    row = only(told(*events))
    assert (row.germinated, row.cut, row.rolled_back, row.pruned, row.living) == (
        2,
        1,
        1,
        0,
        0,
    )
    assert row.contribution_pruned is None


def test_a_fossil_that_a_rollback_takes_back_was_not_kept() -> None:
    row = only(
        told(*kept(), change("PRUNED", 6, cause="rollback"), epoch(6), ended(10))
    )
    assert (row.fossilized, row.rolled_back, row.epochs_lived) == (0, 1, 6.0)
    assert row.parameters is None


def test_an_unfinished_seed_is_living_also_after_its_episode() -> None:
    running = told(change("GERMINATED", 1), epoch(4))
    assert (only(running).living, only(running).epochs_lived) == (1, 3.0)
    running.handle(ended(9))
    assert (only(running).living, only(running).epochs_lived) == (1, 8.0)


def test_a_refusal_counts_for_the_seed_that_it_is_about() -> None:
    analytics = told(
        change("GERMINATED", 0, "norm"),
        refused(None),
        refused("lora", "r0c1"),
        refused(None, "r1c0"),
    )
    assert {row.blueprint: row.rejected for row in analytics.rows()} == {
        "norm": 1,
        "lora": 1,
    }


def test_hosts_and_episodes_do_not_mix() -> None:
    events: list[Event] = []
    for env in (0, 1):
        for episode in (0, 1):
            here = {"env": env, "episode": episode}
            events += [change("GERMINATED", 0, **here), epoch(1, {"r0c0": 1.0}, **here)]
    events += [
        change("PRUNED", 2, env=1, episode=1),
        change("FOSSILIZED", 2, env=0, episode=1),
    ]
    row = only(told(*events))
    assert (row.germinated, row.pruned, row.fossilized, row.living) == (4, 1, 1, 2)


def test_the_total_is_that_of_all_blueprints() -> None:
    analytics = told(
        *kept(),
        *kept("r0c1", "lora"),
        *(change("GERMINATED", 5, "lora", "r1c0"),),
        ended(10),
    )
    total = analytics.total()
    assert [row.blueprint for row in analytics.rows()] == [
        "lora",
        "norm",
    ]  # the most planted first
    assert total.blueprint == "all"
    assert (total.germinated, total.fossilized, total.living) == (3, 2, 1)
    assert total.contribution_kept == 1.5
    assert total.epochs_lived == 25 / 3


def test_of_hosts_whose_episode_has_ended_only_sums_stay_in_memory() -> None:
    analytics = BlueprintAnalytics()
    for event in [*kept(), refused("lora"), ended(10)]:
        analytics.handle(event)
    size = len(pickle.dumps(analytics))
    for episode in range(1, 200):
        for event in [*kept(), refused("lora"), ended(10)]:
            analytics.handle(replace(event, episode=episode))  # type: ignore[call-arg]
    assert analytics.total().germinated == 200
    assert len(pickle.dumps(analytics)) < size + 100
