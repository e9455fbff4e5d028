"""Rewards, and what the agent learned from them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from esper.report.charts import Line, by_round, drawable, line_figure
from esper.report.curves import by_epoch, shown_epochs
from esper.report.html import figures, heading, note, section
from esper.report.read import Run
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


def reward_section(runs: Sequence[Run]) -> str:
    shared = returns_figure(runs)
    if len(runs) == 1:
        return section("reward", "Reward", figures(shared, terms_by_round(runs[0]), terms_by_epoch(runs[0])))
    parts = [heading(run.name, True) + figures(terms_by_round(run), terms_by_epoch(run)) for run in runs]
    return section("reward", "Reward", figures(shared), *parts)


def returns_figure(runs: Sequence[Run]) -> str:
    """Mean discounted return by round."""
    words = "Discounted return, mean over the hosts of a round."
    lines = _of_runs(runs, RoundCompleted, "mean_return", "return")
    return line_figure("Return by round", words, lines, "round", "discounted return", 3)


def _of_runs(runs: Sequence[Run], kind: type[Event], field: str, name: str) -> list[Line]:
    """Returns a line for each run with such events, in the run's colour; a single run's is called ``name``."""
    return [
        line
        for place, run in enumerate(runs)
        for line in by_round(run.name if len(runs) > 1 else name, run.of(kind), field, place)
    ]


def terms_by_round(run: Run) -> str:
    """Sum of each reward term in an episode, by round; of completed rounds only, if any is."""
    sums: dict[int, Counter[str]] = defaultdict(Counter)
    hosts: dict[int, set[int]] = defaultdict(set)
    for epoch in sorted(run.of(EpochCompleted), key=lambda e: (e.episode, e.env)):
        if not run.view.done or epoch.episode < run.view.done:
            hosts[epoch.episode].add(epoch.env)
            sums[epoch.episode].update({n: v for n, v in epoch.reward_terms.items() if drawable(v)})
    x = [episode + 1 for episode in hosts]
    lines = [
        Line(name, x, [sums[episode][name] / len(envs) for episode, envs in hosts.items()], place)
        for place, name in enumerate(_reward_terms(run.of(EpochCompleted)))
    ]
    if not lines:
        return note("No reward terms were logged.")
    words = "Undiscounted sum over an episode, mean over the hosts of a round."
    return line_figure("Reward terms by round", words, lines, "round", "reward of an episode", 3, [0.0])


def terms_by_epoch(run: Run) -> str:
    """Each reward term by epoch of the episode."""
    epochs, words = shown_epochs(run)
    lines = []
    for place, name in enumerate(_reward_terms(epochs)):
        curve = by_epoch(epochs, lambda e, name=name: e.reward_terms.get(name))  # type: ignore[misc]
        lines.append(Line(name, curve.x, curve.mean, place))
    about = f"Mean over the hosts of {words}."
    return line_figure("Reward terms by epoch", about, lines, "epochs done", "reward of an epoch", 3, [0.0])


def _reward_terms(epochs: Sequence[EpochCompleted]) -> list[str]:
    """Returns the names of all reward terms, in the order in which they first appear."""
    return list(dict.fromkeys(name for epoch in epochs for name in epoch.reward_terms))


def policy_section(runs: Sequence[Run]) -> str:
    """Entropy, KL and other figures of the updates, and the practice before them."""
    learning = [run for run in runs if run.of(PolicyUpdated)]
    if not learning:
        why = "has not learned from a round yet" if any(run.learns for run in runs) else "does not learn"
        return section("policy", "The agent", note(f"No policy to show: the controller {why}."))
    parts = [_kl(runs, learning)]
    for field, (title, label, words) in UPDATES.items():
        about = f"{learning[0].name}. {words}" if len(runs) > len(learning) == 1 else words
        lines = _of_runs(runs, PolicyUpdated, field, label)
        parts.append(line_figure(title, about, lines, "round", label, 3))
    words = "Of the most likely actions, on hosts that the agent does not learn from. The best agent is kept."
    lines = _of_runs(runs, AgentValidated, "mean_return", "return")
    parts.append(line_figure("Return on validation hosts", words, lines, "round", "discounted return", 3))
    return section("policy", "The agent", figures(*parts), *(figures(_heads(run), _practice(run)) for run in learning))


def _kl(runs: Sequence[Run], learning: Sequence[Run]) -> str:
    """KL divergence, with the limit at which an update stops if the runs share one."""
    words = "Between the policies before an update and after its last minibatch (k3 estimator)."
    lines = _of_runs(runs, PolicyUpdated, "approx_kl", "KL")
    limit, *others = {_kl_limit(run) for run in learning}
    if limit is not None and not others:
        x = [value for line in lines for value in line.x]
        lines.append(Line("updates stop here", [min(x), max(x)], [limit, limit], -1, reference=True))
    return line_figure("KL divergence", words, lines, "round", "KL, nats", 4, [0.0])


def _kl_limit(run: Run) -> float | None:
    target, stop = run.value("ppo", "target_kl"), run.value("ppo", "kl_stop")
    known = all(isinstance(v, int | float) and not isinstance(v, bool) and drawable(v) for v in (target, stop))
    return float(target * stop) if known else None


def _heads(run: Run) -> str:
    updates = run.of(PolicyUpdated)
    lines = []
    for place, name in enumerate(dict.fromkeys(name for update in updates for name in update.head_entropies)):
        own = {u.round: u.head_entropies[name] for u in updates if name in u.head_entropies}
        lines.append(Line(name, list(own), list(own.values()), place))
    title = f"{run.name}: entropy of each head"
    words = "1: all choices are equally likely. Mean over the steps in which the head affects the action."
    return line_figure(title, words, lines, "round", "entropy, 0 to 1", include=[0.0, 1.0])


def _practice(run: Run) -> str:
    words = "On simulated hosts, before training on real ones."
    lines = by_round("return", run.of(PracticeRound), "mean_return", 0)
    return line_figure(f"{run.name}: practice", words, lines, "practice round", "discounted return", 3)
