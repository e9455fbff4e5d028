"""Rewards, and what the agent learned from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from esper.report.charts import Line, Plot, line_chart
from esper.report.curves import by_epoch, episodes, epochs_of, shown_rounds
from esper.report.figure import figure, figures, lines_legend, lines_table, note, section
from esper.report.growth import epoch_rewards
from esper.report.read import Run
from esper.report.svg import Ids, drawable
from esper.report.text import escape, number
from esper.telemetry.event import EpochCompleted, PolicyUpdated, PracticeRound, RoundCompleted


def reward_section(ids: Ids, runs: Sequence[Run]) -> str:
    parts = [figures(returns_figure(ids, runs))] if len(runs) > 1 else []
    for run in runs:
        if len(runs) > 1:
            parts.append(f"<h3>{escape(run.name)}</h3>")
        alone = [returns_figure(ids, [run])] if len(runs) == 1 else []
        parts.append(figures(*alone, terms_by_round(ids, run), terms_by_epoch(ids, run)))
    return section("reward", "Reward", *parts)


def _chart(ids: Ids, plot: Plot, words: str, lines: Sequence[Line]) -> str:
    drawing = line_chart(ids, plot, lines)
    return figure(plot.title, words, drawing, lines_legend(lines), lines_table(plot.x_label, lines, plot.digits))


def _ends(lines: Sequence[Line]) -> str:
    return "; ".join(f"{line.name} ends at {number(line.rows()[-1][1], 3)}" for line in lines if line.rows())


def returns_figure(ids: Ids, runs: Sequence[Run]) -> str:
    """Mean discounted return by round."""
    lines = []
    for place, run in enumerate(runs):
        rounds = run.of(RoundCompleted)
        if rounds:
            name = run.name if len(runs) > 1 else "return"
            lines.append(Line(name, [float(e.round) for e in rounds], [e.mean_return for e in rounds], place))
    if not lines:
        return ""
    plot = Plot("Return by round", _ends(lines), "round", "discounted return", digits=3)
    return _chart(ids, plot, "Discounted return, mean over the hosts of a round.", lines)


def _totals(run: Run) -> dict[int, tuple[int, dict[str, float]]]:
    """Returns the number of hosts and the summed reward terms of each completed round, counted from 0.

    Without a completed round, all rounds are included.
    """
    found: dict[int, tuple[int, dict[str, float]]] = {}
    for (episode, _), epochs in episodes(run).items():
        if episode >= max(run.done, 1) and run.of(RoundCompleted):
            continue
        hosts, terms = found.get(episode, (0, defaultdict(float)))
        for epoch in epochs:
            for name, value in epoch.reward_terms.items():
                if drawable(value):
                    terms[name] += value
        found[episode] = hosts + 1, terms
    return found


def terms_by_round(ids: Ids, run: Run) -> str:
    """Sum of each reward term in an episode, by round."""
    totals = _totals(run)
    x = [float(episode + 1) for episode in totals]
    names = epoch_rewards(run.of(EpochCompleted))
    lines = [
        Line(name, x, [terms.get(name, 0.0) / hosts for hosts, terms in totals.values()], place % 8, dashed=place > 7)
        for place, name in enumerate(names)
    ]
    if not lines:
        return note("No reward terms were logged.")
    plot = Plot("Reward terms by round", _ends(lines), "round", "reward of an episode", digits=3, zero=True)
    return _chart(ids, plot, "Undiscounted sum over an episode, mean over the hosts of a round.", lines)


def terms_by_epoch(ids: Ids, run: Run) -> str:
    """Each reward term by epoch of the episode."""
    chosen, words = shown_rounds(run)
    epochs = epochs_of(run, chosen)
    lines = []
    for place, name in enumerate(epoch_rewards(epochs)):
        curve = by_epoch(epochs, lambda e, name=name: e.reward_terms.get(name))  # type: ignore[misc]
        lines.append(Line(name, curve.x, curve.mean, place % 8, dashed=place > 7))
    if not lines:
        return ""
    plot = Plot("Reward terms by epoch", _ends(lines), "epochs done", "reward of an epoch", digits=3, zero=True)
    return _chart(ids, plot, f"Mean over the hosts of {words}.", lines)


def policy_section(ids: Ids, runs: Sequence[Run]) -> str:
    """Entropy, KL and other figures of the updates, and the practice before them."""
    learning = [run for run in runs if run.of(PolicyUpdated)]
    if not learning:
        why = "has not learned from a round yet" if any(run.learns for run in runs) else "does not learn"
        return section("policy", "The agent", note(f"No policy to show: the controller {why}."))
    critic = "How well the critic predicts returns: 1 is perfect, 0 no better than their mean."
    parts = [
        figures(
            _updates(ids, runs, "entropy", "Policy entropy", "Sum over the heads that affect the action.", "entropy"),
            _kl(ids, runs),
            _updates(ids, runs, "explained_variance", "Explained variance", critic, "explained variance"),
            _updates(
                ids, runs, "clip_fraction", "Clip fraction", "Fraction of samples that were clipped.", "clip fraction"
            ),
        )
    ]
    parts += [figures(_heads(ids, run), _practice(ids, run)) for run in learning]
    return section("policy", "The agent", *parts)


def _by_update(runs: Sequence[Run], field: str, label: str) -> list[Line]:
    """Returns a line for each run that learned, in the run's colour."""
    return [
        Line(
            run.name if len(runs) > 1 else label,
            [float(event.round) for event in run.of(PolicyUpdated)],
            [getattr(event, field) for event in run.of(PolicyUpdated)],
            place,
        )
        for place, run in enumerate(runs)
        if run.of(PolicyUpdated)
    ]


def _updates(ids: Ids, runs: Sequence[Run], field: str, title: str, words: str, label: str) -> str:
    lines = _by_update(runs, field, label)
    if len(runs) > len(lines) == 1:
        words = f"{lines[0].name}. {words}"
    return _chart(ids, Plot(title, _ends(lines), "round", label, digits=3), words, lines)


def _kl(ids: Ids, runs: Sequence[Run]) -> str:
    """KL divergence, with the limit at which an update stops if the runs share one."""
    words = "Between the policies before an update and after its last minibatch (k3 estimator)."
    lines = _by_update(runs, "approx_kl", "KL")
    limits = {_limit(run) for run in runs if run.of(PolicyUpdated)}
    limit = limits.pop() if len(limits) == 1 else None
    if limit is not None:
        x = [value for line in lines for value in line.x]
        lines.append(Line("updates stop here", [min(x), max(x)], [limit, limit], -1, dashed=True))
    return _chart(ids, Plot("KL divergence", _ends(lines), "round", "KL, nats", digits=4, zero=True), words, lines)


def _limit(run: Run) -> float | None:
    target, stop = run.value("ppo", "target_kl"), run.value("ppo", "kl_stop")
    there = all(isinstance(v, int | float) and not isinstance(v, bool) and drawable(v) for v in (target, stop))
    return float(target * stop) if there else None


def _heads(ids: Ids, run: Run) -> str:
    updates = run.of(PolicyUpdated)
    names = list(dict.fromkeys(name for update in updates for name in update.head_entropies))
    lines = []
    for place, name in enumerate(names):
        told = [(float(u.round), u.head_entropies[name]) for u in updates if name in u.head_entropies]
        lines.append(Line(name, [x for x, _ in told], [y for _, y in told], place % 8, dashed=place > 7))
    if not lines:
        return ""
    plot = Plot(f"{run.name}: entropy of each head", _ends(lines), "round", "entropy, 0 to 1", zero=True, limits=[1.0])
    return _chart(
        ids, plot, "1: all choices are equally likely. Mean over the steps in which the head affects the action.", lines
    )


def _practice(ids: Ids, run: Run) -> str:
    rounds = run.of(PracticeRound)
    if not rounds:
        return ""
    line = Line("return", [float(e.round) for e in rounds], [e.mean_return for e in rounds], 0)
    plot = Plot(f"{run.name}: practice", _ends([line]), "practice round", "discounted return", digits=3)
    return _chart(ids, plot, "On simulated hosts, before training on real ones.", [line])
