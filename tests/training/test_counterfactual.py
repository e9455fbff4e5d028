"""Counterfactuals: the configurations of a plan, paired statistics, and one shared pass against separate passes."""

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from esper.core.blend import Seed
from esper.core.blueprints import BLUEPRINTS
from esper.core.ramps import STYLES, BlendOperator
from esper.core.site import Place, PlantedSeed, Role, Site
from esper.core.stage import SeedStage
from esper.training.counterfactual import (
    ALL_OFF,
    Coalition,
    CounterfactualHelper,
    coalitions,
    exact,
    max_configurations,
    paired,
)
from esper.training.validate import Configuration, evaluate
from tests.core_helpers import (
    DAMAGE,
    ROLES,
    digits,
    make_training,
    plant,
    rig,
    same_bits,
    tensors_of,
    train,
)

S = SeedStage


def sites(*given: tuple[SeedStage, float]) -> list[Site]:
    """Sites a, b, c, ... with the role of these stages and these alphas; an incubating one has its target there."""
    made = []
    for name, (stage, alpha) in zip("abcdef", given, strict=False):
        site, role = Site(Place(name, 3)), ROLES.get(stage, Role.ABSENT)
        module = Seed(nn.Identity(), BlendOperator.ADD, 3, "cnn")
        seed = PlantedSeed(
            module,
            BLUEPRINTS.get("cnn", "norm"),
            STYLES["LINEAR_ADD"],
            torch.tensor(True),
        )
        if stage is not SeedStage.DORMANT:
            site.planted = seed
            site.assign(role, 0.0 if role is Role.INCUBATING else alpha, alpha)
        made.append(site)
    return made


def named(
    helper: CounterfactualHelper, configurations: list[Configuration]
) -> dict[Coalition | str, Configuration]:
    assert len(set(configurations)) == len(configurations)
    return {name: configurations[row] for name, row in helper.row_of.items()}


def planned(
    *given: tuple[SeedStage, float], **options: bool
) -> tuple[CounterfactualHelper, list[Configuration]]:
    """A helper with the plan for these sites, in which no sample of four is right."""
    helper = CounterfactualHelper()
    plan = helper.plan(sites(*given), **{"costly": True, **options})
    helper.record(np.zeros((len(plan), 4)), np.zeros(len(plan)), np.ones(4))
    return helper, plan


def test_two_blended_and_one_on_trial() -> None:
    helper, plan = planned((S.FOSSILIZED, 1.0), (S.TRAINING, 0.7), (S.BLENDING, 0.4))
    assert named(helper, plan) == {
        frozenset("ac"): (1.0, 0, 0.4),
        ALL_OFF: (0, 0, 0),
        frozenset("a"): (1.0, 0, 0),
        frozenset("c"): (0, 0, 0.4),
        "b": (1.0, 0.7, 0.4),
    }
    assert (helper.all_on, helper.committed) == (frozenset("ac"), frozenset("a"))
    assert len(plan) == 5


@pytest.mark.parametrize(
    ("blended", "pairs", "distinct"), [(2, 1, 4), (3, 3, 8), (4, 6, 16), (5, 0, 12)]
)
def test_pairs_are_measured_for_three_and_four(
    blended: int, pairs: int, distinct: int
) -> None:
    """Two seeds: the pair is all on. Three: it is all but one. Up to four seeds, all subsets are measured."""
    helper, plan = planned(*[(S.HOLDING, 1.0)] * blended)
    found = named(helper, plan)
    assert sum(len(name) == 2 for name in found) == pairs
    for name, configuration in found.items():
        assert {
            "abcdef"[site] for site, alpha in enumerate(configuration) if alpha
        } == name
    assert len(found) == len(plan) == distinct


def test_the_costly_ones_can_be_left_out() -> None:
    helper, plan = planned(*[(S.HOLDING, 1.0)] * 3, costly=False)
    assert set(named(helper, plan)) == {
        frozenset(kept) for kept in ("abc", "", "bc", "ac", "ab")
    }
    assert helper.interaction("a") is None


@pytest.mark.parametrize(
    ("blended", "costly", "known"),
    [(1, False, True), (2, False, False), (2, True, True)],
)
def test_an_interaction_of_two_is_a_costly_one_and_that_of_one_is_none_at_all(
    blended: int, costly: bool, known: bool
) -> None:
    """All subsets of two seeds are in every plan."""
    helper, _ = planned(*[(S.HOLDING, 1.0)] * blended, costly=costly)
    assert helper.interaction("a") == (0.0 if known else None)
    assert set(helper.shapley()) == set("ab"[:blended])


@pytest.mark.parametrize("count", [2, 3])
def test_interactions_by_hand(count: int) -> None:
    helper = CounterfactualHelper()
    plan = helper.plan(sites(*[(S.HOLDING, 1.0)] * count), costly=True)
    right = {  # of 100 images, by what is on
        (): 40,
        ("a",): 50,
        ("b",): 45,
        ("c",): 41,
        ("a", "b"): 70,
        ("a", "c"): 49,
        ("b", "c"): 46,
        ("a", "b", "c"): 72,
    }
    correct = np.zeros((len(plan), 100), dtype=np.uint8)
    for row, configuration in enumerate(plan):
        correct[
            row,
            : right[
                tuple("abc"[site] for site, alpha in enumerate(configuration) if alpha)
            ],
        ] = 1
    helper.record(correct, np.zeros(len(plan)), np.ones(correct.shape[1]))
    pair_ab = 70 - 50 - 45 + 40
    pair_ac = 49 - 50 - 41 + 40
    pair_bc = 46 - 45 - 41 + 40
    if count == 2:
        assert helper.interaction("a") == pytest.approx(pair_ab)
        assert helper.interaction("b") == pytest.approx(pair_ab)
    else:
        assert helper.interaction("a") == pytest.approx(pair_ab + pair_ac)
        assert helper.interaction("b") == pytest.approx(pair_ab + pair_bc)
        assert helper.interaction("c") == pytest.approx(pair_ac + pair_bc)


@pytest.mark.finding("M13")
def test_reset_forgets_the_matrix() -> None:
    helper, _ = planned((S.HOLDING, 1.0), (S.TRAINING, 1.0))
    helper.reset()
    assert (helper.row_of, helper.configurations, helper.on) == ({}, [], [])
    assert helper.correct.size == helper.loss.size == 0
    assert helper.contribution("a") is None
    assert helper.trial_of("b") is None
    with pytest.raises(KeyError):
        helper.accuracy(helper.all_on)


@pytest.mark.finding("M13")
def test_a_rollback_resets_the_helper_of_its_env_and_of_no_other() -> None:
    with rig(n_envs=2, horizon=12) as world:
        for env in range(2):
            world.grow("r0c0", S.HOLDING, env=env)
        helpers = [world.host(env).counterfactual for env in range(2)]
        assert all(helper.contribution("r0c0") is not None for helper in helpers)
        DAMAGE["NaN weight"](world.training(0))
        world.step()
        assert (helpers[0].row_of, helpers[0].configurations) == ({}, [])
        assert helpers[1].contribution("r0c0") is not None
        world.step()  # measured anew, of the host that was restored
        assert helpers[0].configurations == [(0.0,) * 4]


@pytest.mark.parametrize("style", ["LINEAR_ADD", "LINEAR_MULTIPLY", "GATED_GATE"])
def test_one_pass_gives_the_results_of_a_pass_per_configuration(style: str) -> None:
    training = make_training()
    plant(training, "r0c0", stage=S.FOSSILIZED, style=style)
    plant(training, "r1c0", stage=S.BLENDING, target=0.7, style=style)
    plant(training, "r1c1", stage=S.HOLDING, blueprint="attention", style=style)
    plant(training, "r0c1", stage=S.TRAINING, target=0.5, style=style)
    train(training, 2)
    helper = CounterfactualHelper()
    plan = helper.plan(training.sites, costly=True)
    assert len(plan) == 9  # all eight subsets of three blended seeds, and the trial
    before = tensors_of(training, ("r0c0", "r1c0", "r1c1", "r0c1"))
    together = evaluate(training, digits().validation, plan)
    same_bits(before, tensors_of(training, ("r0c0", "r1c0", "r1c1", "r0c1")))
    for row, configuration in enumerate(plan):
        alone = evaluate(training, digits().validation, [configuration])
        assert torch.equal(together.correct[row], alone.correct[0]), configuration
        assert together.loss[row] == alone.loss[0]
    assert len(set(together.loss.tolist())) == len(plan)  # they are different networks


@given(
    stages=st.lists(
        st.sampled_from([S.DORMANT, S.TRAINING, S.BLENDING, S.HOLDING, S.FOSSILIZED]),
        max_size=6,
    )
)
def test_no_plan_is_longer_than_its_buffers(stages: list[SeedStage]) -> None:
    """The totals of all envs share one block that is allocated once; a plan that did not fit would end the run."""
    _, plan = planned(*((stage, 0.5 + 0.05 * i) for i, stage in enumerate(stages)))
    assert len(plan) <= max_configurations(len(stages))


@given(
    stages=st.lists(
        st.sampled_from(
            [S.GERMINATED, S.TRAINING, S.BLENDING, S.HOLDING, S.FOSSILIZED]
        ),
        max_size=6,
    )
)
def test_a_lean_plan_has_two_configurations_and_one_for_each_living_seed(
    stages: list[SeedStage],
) -> None:
    """It measures every living seed, and what it does not measure it does not tell."""
    given = [(stage, 0.5 + 0.05 * i) for i, stage in enumerate(stages)]
    helper, plan = planned(*given, costly=False, lean=True)
    assert len(plan) <= 2 + sum(stage is not S.FOSSILIZED for stage in stages)
    assert helper.measured(helper.all_on)
    assert helper.measured(helper.committed)
    for name, stage in zip("abcdef", stages, strict=False):
        assert (helper.trial_of(name) is not None) == (stage is S.TRAINING)
        if stage in (S.BLENDING, S.HOLDING):
            assert helper.contribution(name) is not None


def test_a_lean_plan_leaves_out_what_each_fossil_adds() -> None:
    stages = [*[(S.FOSSILIZED, 1.0)] * 3, *[(S.HOLDING, 1.0)] * 2]
    helper, plan = planned(*stages, costly=False, lean=True)
    assert set(named(helper, plan)) == {
        frozenset(kept) for kept in ("abcde", "abc", "abce", "abcd")
    }
    assert not helper.measured(ALL_OFF)
    assert [helper.contribution(slot) for slot in "abc"] == [None] * 3


# Shapley values


def test_the_error_of_one_target_per_sample_is_that_of_a_mean() -> None:
    d = np.random.default_rng(0).integers(-1, 2, 200).astype(np.float64)
    found = paired(d, np.ones(200))
    assert found.difference == pytest.approx(100 * d.mean())
    assert found.error == pytest.approx(100 * d.std(ddof=1) / np.sqrt(200))


def test_samples_with_more_targets_weigh_more() -> None:
    """Ratio 2 / 10; residuals 1 - 1.6 and 1 - 0.4, so the error is sqrt(2 / 1 · (0.36 + 0.36)) / 10."""
    found = paired(np.array([1.0, 1.0]), np.array([8.0, 2.0]))
    assert found.difference == pytest.approx(20)
    assert found.error == pytest.approx(12)


Floats = NDArray[np.float64]
NAMES = ("a", "b", "c", "d")


def results(
    count: int, n: int = 60, tokens: bool = False
) -> tuple[dict[Coalition, Floats], Floats]:
    """Random results of all coalitions of ``count`` slots."""
    rng = np.random.default_rng(count)
    counts = rng.integers(1, 9, n).astype(float) if tokens else np.ones(n)
    return {
        c: rng.binomial(counts.astype(int), rng.uniform(0.1, 0.9)).astype(float)
        for c in coalitions(NAMES[:count])
    }, counts


def brute_force(
    names: tuple[str, ...], correct: dict[Coalition, Floats], counts: Floats
) -> dict[str, float]:
    """The definition: the mean gain of a slot over all orders."""
    gains: dict[str, list[float]] = {name: [] for name in names}
    for order in permutations(names):
        for place, slot in enumerate(order):
            before = frozenset(order[:place])
            gains[slot].append(
                100
                * float(
                    (correct[before | {slot}] - correct[before]).sum() / counts.sum()
                )
            )
    return {name: float(np.mean(values)) for name, values in gains.items()}


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_exact_values_are_those_of_all_orders(count: int, tokens: bool) -> None:
    correct, counts = results(count, tokens=tokens)
    names = NAMES[:count]
    found = exact(names, correct, counts)
    wanted = brute_force(names, correct, counts)
    assert {name: value.difference for name, value in found.items()} == pytest.approx(
        wanted
    )
    whole = 100 * float(
        (correct[frozenset(names)] - correct[frozenset()]).sum() / counts.sum()
    )
    assert sum(value.difference for value in found.values()) == pytest.approx(whole)


def test_a_slot_that_changes_nothing_is_worth_nothing_and_twins_are_worth_the_same() -> (
    None
):
    correct, counts = results(2)
    idle = {c | {"c"}: value for c, value in correct.items()} | correct
    found = exact(("a", "b", "c"), idle, counts)
    assert (found["c"].difference, found["c"].error) == (0, 0)
    twins = {c: np.full(60, float(len(c))) for c in coalitions(("a", "b"))}
    both = exact(("a", "b"), twins, counts)
    assert both["a"] == both["b"]
