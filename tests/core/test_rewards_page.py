"""docs/controllers.md lists all reward modes and terms, with their default weights."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from esper.config import RewardConfig
from esper.core.reward_modes import MODES, POTENTIALS, TERMS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "controllers.md").read_text(
    encoding="utf-8"
)


def table(heading: str) -> dict[str, str]:
    """The rows of the table whose first column has this heading: first cell to second."""
    rows = re.search(
        rf"^\| {heading} \|.*\n\|---\|---\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE
    )
    assert rows
    return dict(re.findall(r"^\| `(\w+)`[^|]* \| (.*) \|$", rows[1], re.MULTILINE))


def test_the_page_lists_the_terms_of_every_mode() -> None:
    assert {
        mode: tuple(re.findall(r"`(\w+)`", terms))
        for mode, terms in table("mode").items()
    } == dict(MODES)
    assert f"`{RewardConfig().mode}` (default)" in PAGE


def test_the_page_explains_every_term() -> None:
    assert set(table("term")) == set(TERMS) | set(POTENTIALS)


@pytest.mark.parametrize(
    ("term", "text"),
    [
        ("benefit", "{benefit_scale:g} pp count as 1"),
        ("advantage", "{benefit_scale:g} pp count as 1"),
        (
            "loss_benefit",
            "{loss_benefit_scale:g} standard deviations of the baseline's final loss are 1",
        ),
        ("rent", "−min({rent_rate} · ln(1 + added / host), {rent_cap}) / T"),
        ("fossil_cost", "−{sparse_parameter_cost} "),
        ("contribution_potential", "{contribution_potential} a pp"),
        (
            "loss_contribution_potential",
            "{loss_contribution_potential} a standard deviation",
        ),
        (
            "action_cost",
            "−{germinate_cost} for GERMINATE, −{refused_cost} for an ADVANCE",
        ),
        ("action_cost", "−{action_cost} for any other"),
        ("governor", "−{rollback_penalty:g} "),
    ],
)
def test_the_weights_of_the_page_are_the_defaults(term: str, text: str) -> None:
    assert text.format(**RewardConfig().model_dump()) in table("term")[term]
