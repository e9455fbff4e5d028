"""Rewards, and what the agent learned from them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain

from esper.show.charts import Line, by_round, drawable, line_figure
from esper.show.curves import by_epoch, shown_epochs
from esper.show.html import figures, heading, note, section
from esper.show.read import Run, Runs
from esper.telemetry.event import AgentValidated, EpochCompleted, Event, PolicyUpdated, PracticeRound, RoundCompleted

UPDATES = {
    "entropy": ("Policy entropy", "entropy", "Sum over the heads that affect the action."),
    "explained_variance": (
        "Explained variance",
        "explained variance",
        "How well the critic predicts returns: 1 is perfect, 0 no better than their mean.",
    ),
    "clip_fraction": ("Clip fraction", "clip fraction", "Fraction of samples that were clipped."),
}
"""Title, name of the axis and description of the charts of PolicyUpdated fields."""


def reward_section(runs: Runs) -> str:
    shared = returns_figure(runs)
    if len(runs) == 1:
        return section("reward", "Reward", figures(shared, terms_by_round(runs[0]), terms_by_epoch(runs[0])))
    parts = [figures(shared)]
    for run in runs:
        parts.append(heading(run.name, True))
        parts.append(figures(terms_by_round(run), terms_by_epoch(run)))
    return section("reward", "Reward", *parts)


def returns_figure(runs: Runs) -> str:
    """Mean discounted return by round."""
    words = "Discounted return, mean over the hosts of a round."
    return _returns("Return by round", words, runs, RoundCompleted)


def _returns(title: str, words: str, runs: Runs, kind: type[Event], x_label: str = "round") -> str:
    lines = _of_runs(runs, kind, "mean_return", "return")
    return line_figure(title, words, lines, x_label, "discounted return", 3)


def _of_runs(runs: Runs, kind: type[Event], field: str, name: str) -> list[Line]:
    """Returns a line for each run with such events, in the run's colour; a single run's is called ``name``."""
    lines = []
    for place, run in enumerate(runs):
        if len(runs) > 1:
            name = run.name
        lines += by_round(name, run.of(kind), field, place)
    return lines


def terms_by_round(run: Run) -> str:
    """Sum of each reward term in an episode, by round; of completed rounds only, if any is."""
    sums: dict[int, Counter[str]] = defaultdict(Counter)
    hosts: dict[int, set[int]] = defaultdict(set)
    completed = run.view.done
    for epoch in sorted(run.of(EpochCompleted), key=lambda e: (e.episode, e.env)):
        if completed and epoch.episode >= completed:
            continue
        hosts[epoch.episode].add(epoch.env)
        sums[epoch.episode].update({name: v for name, v in epoch.reward_terms.items() if drawable(v)})
    lines = []
    for place, name in enumerate(_reward_terms(run.of(EpochCompleted))):
        rounds = []
        means = []
        for episode, envs in hosts.items():
            rounds.append(episode + 1)
            means.append(sums[episode][name] / len(envs))
        lines.append(Line(name, rounds, means, place))
    if not lines:
        return note("No reward terms were logged.")
    words = "Undiscounted sum over an episode, mean over the hosts of a round."
    return line_figure(
        "Reward terms by round",
        words,
        lines,
        "round",
        "reward of an episode",
        3,
        [0.0],
    )


def terms_by_epoch(run: Run) -> str:
    """Each reward term by epoch of the episode."""
    epochs, words = shown_epochs(run)
    lines = []
    for place, name in enumerate(_reward_terms(epochs)):
        curve = by_epoch(epochs, lambda e, name=name: e.reward_terms.get(name))  # type: ignore[misc]
        lines.append(Line(name, curve.x, curve.mean, place))
    about = f"Mean over the hosts of {words}."
    return line_figure(
        "Reward terms by epoch",
        about,
        lines,
        "epochs done",
        "reward of an epoch",
        3,
        [0.0],
    )


def _reward_terms(epochs: Sequence[EpochCompleted]) -> list[str]:
    """Returns the names of all reward terms, in the order in which they first appear."""
    names: dict[str, float] = {}
    for epoch in epochs:
        names |= epoch.reward_terms
    return list(names)


def policy_section(runs: Runs) -> str:
    """Entropy, KL and other figures of the updates, and the practice before them."""
    learning = [run for run in runs if run.of(PolicyUpdated)]
    if not learning:
        reason = "does not learn"
        if any(run.view.learns for run in runs):
            reason = "has not learned from a round yet"
        return section("agent", "The agent", note(f"No policy to show: the controller {reason}."))
    charts = [_kl(runs, learning)]
    for field, (title, label, words) in UPDATES.items():
        if len(runs) > len(learning) == 1:
            words = f"{learning[0].name}. {words}"
        lines = _of_runs(runs, PolicyUpdated, field, label)
        charts.append(line_figure(title, words, lines, "round", label, 3))
    words = "Of the most likely actions, on hosts that the agent does not learn from. The best agent is kept."
    charts.append(_returns("Return on validation hosts", words, runs, AgentValidated))
    parts = [figures(*charts)]
    parts += [figures(_heads(run), _practice(run)) for run in learning]
    return section("agent", "The agent", *parts)


def _kl(runs: Runs, learning: Runs) -> str:
    """KL divergence, with the limit at which an update stops if the runs share one."""
    words = "Between the policies before an update and after its last minibatch (k3 estimator)."
    lines = _of_runs(runs, PolicyUpdated, "approx_kl", "KL")
    limits = set(map(_kl_limit, learning))
    limit = limits.pop()
    if limit is not None and not limits:
        rounds = list(chain.from_iterable(line.x for line in lines))
        ends = [min(rounds), max(rounds)]
        lines.append(Line("updates stop here", ends, [limit, limit], -1, reference=True))
    return line_figure(
        "KL divergence",
        words,
        lines,
        "round",
        "KL, nats",
        4,
        [0.0],
    )


def _kl_limit(run: Run) -> float | None:
    """Returns the KL divergence at which updates of a run stop; None if its configuration does not tell."""
    target = run.value("ppo", "target_kl")
    stop = run.value("ppo", "kl_stop")
    if isinstance(target, int | float) and isinstance(stop, int | float):
        return float(target * stop)
    return None


def _heads(run: Run) -> str:
    entropies: dict[str, dict[float, float]] = {}
    for update in run.of(PolicyUpdated):
        for name, entropy in update.head_entropies.items():
            entropies.setdefault(name, {})[update.round] = entropy
    lines = []
    for place, (name, points) in enumerate(entropies.items()):
        lines.append(Line(name, list(points), list(points.values()), place))
    title = f"{run.name}: entropy of each head"
    words = "1: all choices are equally likely. Mean over the steps in which the head affects the action."
    return line_figure(
        title,
        words,
        lines,
        "round",
        "entropy, 0 to 1",
        include=[0.0, 1.0],
    )


def _practice(run: Run) -> str:
    words = "On simulated hosts, before training on real ones."
    return _returns(f"{run.name}: practice", words, [run], PracticeRound, "practice round")
