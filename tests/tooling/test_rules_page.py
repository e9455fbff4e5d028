"""docs/env.md says of actions, gates and durations what the code does."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from esper.config import Durations, TrainingConfig
from esper.core.action import HEADS, RELEVANT, ActionSpec, Op
from esper.core.gates import GATES, Gates
from esper.core.ramps import STYLES
from esper.core.slots import Slots
from esper.core.stage import LIVING, SeedStage

PAGE = (Path(__file__).parents[2] / "docs" / "env.md").read_text(encoding="utf-8")
SPEC = ActionSpec(("r0c0",), ("norm",))


def table(heading: str, number: int = 0) -> list[list[str]]:
    """The rows of a section's table, without its head."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    tables = re.findall(r"(?:^\|.*\n)+", section, flags=re.MULTILINE)
    rows = [
        [cell.strip() for cell in row.strip("|").split("|")]
        for row in tables[number].strip().split("\n")
    ]
    return rows[2:]


def test_the_heads_have_the_order_the_choices_and_the_ops_of_the_code() -> None:
    rows = table("Actions")
    assert [row[0] for row in rows] == [f"`{head}`" for head in HEADS]
    for head, (_, choices, ops) in zip(HEADS, rows, strict=True):
        if head not in ("slot", "blueprint"):
            named = re.findall(r"[\w.]+", choices)
            assert named[: len(SPEC.choices(head))] == [
                str(choice) for choice in SPEC.choices(head)
            ]
        matters = {op.name for op in Op if head in RELEVANT[op]}
        told = (
            {op.name for op in Op if op is not Op.WAIT}
            if ops == "all ops but WAIT"
            else set()
        )
        assert (
            told
            | {op.name for op in Op if op.name in ops.replace("all ops but WAIT", "")}
            == matters
        )


def test_every_op_but_wait_has_a_row_in_the_table_of_what_is_legal() -> None:
    assert {row[0] for row in table("Actions", 1)} == {
        op.name for op in Op if op is not Op.WAIT
    }


def test_each_gate_names_its_checks_and_those_that_strict_adds() -> None:
    rows = {row[0]: row for row in table("Gates")}
    assert list(rows) == list(GATES.values())
    checks = {}
    for level in ("permissive", "strict"):
        config = TrainingConfig.parse({"env": {"gates": {"level": level}}})
        gates = Gates(
            Slots.fresh(1, 1),
            np.zeros(1, dtype=np.bool_),
            config.env.gates,
            Durations.of(config, 30),
        )
        checks[level] = {
            stage: [each.name for each in found]
            for stage, found in gates.conditions.items()
        }
    for stage, gate in GATES.items():
        _, opens, told, strict = rows[gate]
        assert opens.startswith(stage.name)
        always, all_checks = checks["permissive"][stage], checks["strict"][stage]
        assert all_checks[: len(always)] == always
        if stage is SeedStage.GERMINATED:
            assert (told, strict) == ("none", "")
            continue
        for name, cell in [
            *((name, told) for name in always),
            *((name, strict) for name in all_checks[len(always) :]),
        ]:
            assert name.replace("trial accuracy difference", "trial") in cell
        assert told.count(";") + 1 == len(always)


def test_every_key_with_a_number_in_brackets_has_that_default() -> None:
    config, found = TrainingConfig.parse({}).model_dump(), 0
    for key, told in re.findall(r"`([a-z_.]+)` \((true|[\d.]+)(?: pp)?\)", PAGE):
        value: Any = config
        for part in (key if "." in key else f"env.gates.{key}").split("."):
            value = value[part]
        assert value == (True if told == "true" else float(told)), key
        found += 1
    assert found >= 12


def test_the_styles_have_the_operators_and_curves_of_the_code() -> None:
    formulas = {"add": "f(h)", "multiply": "h · tanh(f(h))", "gate": "g(h) · f(h)"}
    rows = {row[0]: row[1:] for row in table("Alpha, ramps and clocks")}
    assert list(rows) == list(STYLES)
    for name, style in STYLES.items():
        assert rows[name][0].partition(";")[0] == formulas[style.operator.value]
        assert rows[name][1] == style.curve.value


@pytest.mark.parametrize("horizon", [12, 30, 150, 173])
def test_durations_follow_the_formulas_of_the_page(horizon: int) -> None:
    durations = Durations.of(TrainingConfig.parse({}), horizon)
    for name in (
        "min_training_epochs",
        "min_blending_epochs",
        "min_prune_age",
        "embargo",
        "max_training_epochs",
    ):
        least, divisor = map(
            int,
            re.search(
                rf"`(?:env\.)?{name}`[^(]*\(max\((\d+), T/(\d+)\)\)", PAGE
            ).groups(),
        )  # type: ignore[union-attr]
        assert getattr(durations, name) == max(least, -(-horizon // divisor))
    assert durations.governor_window == max(5, -(-20 * horizon // 150))
    assert "`governor.window` (max(5, 20 T/150))" in PAGE


def test_the_stage_potentials_and_their_weight_are_the_defaults() -> None:
    reward = TrainingConfig.parse({}).reward
    row = next(
        row
        for row in table("What is measured of a seed")
        if row[0].startswith("stage potential")
    )
    told = [float(x) for x in re.findall(r"\d+(?:\.\d+)?", row[1].partition("from")[0])]
    assert told == list(reward.stage_potentials)
    assert f"`reward.stage_potential` ({reward.stage_potential:g})" in row[1]
    assert len(told) == len(LIVING) + 1
