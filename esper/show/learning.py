"""The section about an agent that learns: its returns, and the figures of its updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from esper.show.charts import Block, Chart, Line, note
from esper.show.console import validated
from esper.show.view import RunView
from esper.telemetry import event as events
from esper.telemetry.score import ScoreUnit
from esper.telemetry.text import labelled, number

RETURNS = {
    (events.RoundCompleted, "discounted return"): "Discounted sum of rewards, mean over the hosts of a round.",
    (events.AgentValidated, "discounted return on validation hosts"): (
        "Of the most likely actions, on hosts that the agent does not learn from. The best agent is kept."
    ),
}
"""Description of the charts of returns, by event and title."""
OTHER_HOSTS = " Each round has other hosts, on other data, so rounds cannot be compared with one another."
NO_CURVE = (
    "The agent has no learning curve so far: it plays validation hosts every ppo.validate_every rounds, and only in "
    "runs of more rounds than that."
)
UPDATES = {
    "entropy": ("entropy", "Sum over the heads that affect the action."),
    "KL": ("approx_kl", "Between the policies before an update and after its last minibatch (k3 estimator), nats."),
    "clip fraction": ("clip_fraction", "Fraction of samples that were clipped."),
    "explained variance": (
        "explained_variance",
        "How well the critic predicts returns: 1 is perfect, 0 no better than their mean.",
    ),
}
"""Field of PolicyUpdated and description, by the name of the figure."""


def agent(view: RunView) -> list[Block]:
    """Returns, and the figures of the updates."""
    updates = view.of(events.PolicyUpdated)
    if not updates:
        return []
    last = updates[-1]
    blocks: list[Block] = []
    for (kind, title), words in RETURNS.items():
        found: list[Any] = view.of(kind)
        if found:
            comparable = kind is not events.RoundCompleted or not view.hosts_differ
            if not comparable:
                words += OTHER_HOSTS
            blocks.append(_returns(title, words, found, view.score, comparable))
    if not view.of(events.AgentValidated):
        blocks.append(note(NO_CURVE))
    for name, (field, words) in UPDATES.items():
        line = _by_rounds(name, updates, field)
        blocks.append(Chart(name, words, [line], "round", name, 3))
    heads = []
    x = [event.round for event in updates]
    for place, name in enumerate(last.head_entropies):
        entropies = [event.head_entropies.get(name, math.nan) for event in updates]
        heads.append(Line(name, x, entropies, place, shared=False))
    words = "1: all choices are equally likely. Mean over the steps in which the head affects the action."
    blocks.append(Chart("Entropy of each head", words, heads, "round", "entropy, 0 to 1"))
    stopped = ""
    if last.stopped_early:
        stopped = ", stopped early"
    about = [
        f"round {last.round}: {last.minibatches} minibatches{stopped}",
        f"gradient norm {number(last.gradient_norm)}",
        f"learning rate {last.learning_rate:.1e}",
        f"{last.env_steps:,} env steps",
    ]
    blocks.append(note(", ".join(about)))
    validation = view.last(events.AgentValidated)
    if validation is not None:
        blocks.append(note(validated(validation, view.score)))
    return blocks


def _returns(
    title: str,
    words: str,
    found: Sequence[Any],
    score: ScoreUnit,
    comparable: bool,
) -> Chart:
    """Returns the chart of the discounted returns of events by round, with those of rules, in pp where they are."""
    scale = score.of_reward or 1.0
    unit = score.gap if score.of_reward else ""
    x = [event.round for event in found]
    lines = [Line("return", x, [scale * event.mean_return for event in found], connected=comparable)]
    for rule, level in getattr(found[0], "rules", {}).items():
        lines.append(Line(rule, x, [scale * level] * len(x), -1, reference=True))
    label = labelled("discounted return", unit)
    return Chart(title, words, lines, "round", label, 3)


def _by_rounds(name: str, found: Sequence[Any], field: str) -> Line:
    """Returns the line of a field of events that name their round."""
    x = []
    y = []
    for event in found:
        x.append(event.round)
        y.append(getattr(event, field))
    return Line(name, x, y)
