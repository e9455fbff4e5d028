"""docs/rules.md says of actions, gates and durations what the code does."""

import re
from pathlib import Path

import numpy as np
import pytest

from esper.config import Durations, TrainingConfig
from esper.lifecycle.gates import GATES, Gates
from esper.lifecycle.ramps import STYLES
from esper.lifecycle.slots import Slots
from esper.lifecycle.stage import LIVING, SeedStage
from esper.spaces.action import HEADS, RELEVANT, ActionSpec, Op

PAGE = (Path(__file__).parent.parent / "docs" / "rules.md").read_text(encoding="utf-8")
SPEC = ActionSpec(("r0c0",), ("norm",))


def table(heading: str, number: int = 0) -> list[list[str]]:
    """The rows of a section's table, without its head."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    tables = re.findall(r"(?:^\|.*\n)+", section, flags=re.MULTILINE)
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in tables[number].strip().split("\n")]
    return rows[2:]


def test_the_heads_have_the_order_the_choices_and_the_ops_of_the_code() -> None:
    rows = table("Actions")
    assert [row[0] for row in rows] == [f"`{head}`" for head in HEADS]
    for head, (_, choices, ops) in zip(HEADS, rows, strict=True):
        if head not in ("slot", "blueprint"):
            named = re.findall(r"[\w.]+", choices)
            assert named[: len(SPEC.choices(head))] == [str(choice) for choice in SPEC.choices(head)]
        matters = {op.name for op in Op if head in RELEVANT[op]}
        told = {op.name for op in Op if op is not Op.WAIT} if ops == "all ops but WAIT" else set()
        assert told | {op.name for op in Op if op.name in ops.replace("all ops but WAIT", "")} == matters


def test_every_op_has_a_row_that_says_when_it_is_legal() -> None:
    assert {row[0] for row in table("Actions", 1)} == {op.name for op in Op if op is not Op.WAIT}


@pytest.mark.parametrize("level", ["permissive", "strict"])
def test_each_gate_names_its_checks(level: str) -> None:
    config = TrainingConfig.parse({"env": {"gates": {"level": level}}})
    slots = Slots.fresh(1, 1)
    gates = Gates(slots, np.zeros(1, dtype=np.bool_), config.env.gates, Durations.of(config, 30))
    rows = {row[0]: row for row in table("Gates")}
    assert list(rows) == list(GATES.values())
    for stage, conditions in gates.conditions.items():
        _, opens, checks, strict = rows[GATES[stage]]
        assert opens.startswith(stage.name)
        told = checks + strict if level == "strict" else checks
        for condition in conditions if stage is not SeedStage.GERMINATED else ():
            name = condition.name.replace("trial accuracy difference", "trial")
            assert name in told
        if level == "permissive" and stage is not SeedStage.GERMINATED:
            assert checks.count(";") + 1 == len(conditions)


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
    for name in ("min_training_epochs", "min_blending_epochs", "min_prune_age", "embargo", "max_training_epochs"):
        least, divisor = map(int, re.search(rf"`(?:env\.)?{name}`[^(]*\(max\((\d+), T/(\d+)\)\)", PAGE).groups())  # type: ignore[union-attr]
        assert getattr(durations, name) == max(least, -(-horizon // divisor))
    assert durations.governor_window == max(5, -(-20 * horizon // 150))
    assert "`governor.window` (max(5, 20 T/150))" in PAGE


def test_the_stage_potentials_and_their_weight_are_the_defaults() -> None:
    reward = TrainingConfig.parse({}).reward
    row = next(row for row in table("What is measured of a seed") if row[0].startswith("stage potential"))
    told = [float(x) for x in re.findall(r"\d+(?:\.\d+)?", row[1].partition("from")[0])]
    assert told == list(reward.stage_potentials)
    assert f"`reward.stage_potential` ({reward.stage_potential:g})" in row[1]
    assert len(told) == len(LIVING) + 1
