from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks import exam_fit
from benchmarks.exam_fit import fit
from esper.agents.advisor import ENTRIES, HostFacts, shipped
from esper.core.sizing import FACTORS


def facts(
    width: int, samples: int = 200, factors: tuple[int, ...] = FACTORS
) -> HostFacts:
    return HostFacts(
        widths=(width, width),
        parameters={
            factor: 60 * width * factor + (width * factor) ** 2 for factor in factors
        },
        operations=1e4,
        inputs=64,
        classes=10,
        convolutional=False,
        samples=samples,
        epochs=10,
        updates=60,
        rate=0.03,
    )


def gains(of_one: HostFacts) -> np.ndarray:
    """Layers below 16 units gain 8 pp a doubling."""
    doublings = np.log2(list(of_one.parameters))
    useful = max(0.0, 4 - np.log2(of_one.widths[0]))
    return 8 * np.minimum(doublings, useful) - 1e-3 * doublings


@pytest.fixture(scope="module")
def advisor():
    rng = np.random.default_rng(0)
    seen = [
        facts(int(rng.choice([1, 2, 4, 8, 16, 32])), int(rng.integers(50, 500)))
        for _ in range(120)
    ]
    noisy = [gains(of_one) + rng.normal(size=5) * [0, 1, 1, 1, 1] for of_one in seen]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exam_fit, "STEPS", 400)
        patch.setattr("esper.agents.advisor.MEMBERS", 2)
        return fit(seen, noisy)


def test_it_widens_narrow_layers_only(advisor) -> None:
    chosen = {width: advisor.choose(facts(width), price=3.0) for width in (2, 8, 32)}
    assert chosen[2] in (4, 8, 16)
    assert chosen[8] == 2
    assert chosen[32] == 1


def test_it_declines_at_a_high_price(advisor) -> None:
    assert advisor.choose(facts(2), price=50.0) == 1


def test_a_member_for_each_gain_and_none_without_growing(advisor) -> None:
    predicted = advisor.gains(facts(2))
    assert predicted.shape == (2, 5)
    assert (predicted[:, 0] == 0).all()
    assert predicted[:, 2].mean() == pytest.approx(16, abs=4)


def test_only_what_is_on_offer_is_chosen(advisor) -> None:
    assert advisor.choose(facts(2, factors=(1, 2)), price=0.1) == 2
    nothing = facts(2, factors=(1,))
    assert nothing.plans().shape == (0, ENTRIES)
    assert advisor.choose(nothing, price=0.1) == 1


def test_costs_are_doublings_of_the_parameters() -> None:
    of_one = facts(4)
    grown = of_one.parameters[8] / of_one.parameters[1]
    assert of_one.costs(2.0)[3] == pytest.approx(2 * np.log2(grown))
    assert of_one.costs(2.0)[0] == 0


def test_a_fact_that_never_differed_changes_no_prediction(advisor) -> None:
    of_one = facts(2)
    deeper = replace(of_one, widths=(2, 2, 2))
    assert (advisor.gains(deeper) == advisor.gains(of_one)).all()


def test_it_says_what_is_far_from_all_that_it_learned_from() -> None:
    near = facts(4)
    assert shipped().unlike(near) == []
    far = replace(near, widths=(4, 4, 4), classes=500, operations=1e9)
    assert shipped().unlike(far) == ["layers", "operations", "classes"]
    warning = "such numbers of layers, operations and classes: the gain may be far off"
    assert shipped().words(far, price=1.0).endswith(warning)
    assert "it has learned" not in shipped().words(near, price=1.0)


def test_fitting_leaves_the_random_numbers_of_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    monkeypatch.setattr(exam_fit, "STEPS", 2)
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    fit([facts(2), facts(8)] * 4, [gains(facts(2)), gains(facts(8))] * 4)
    assert torch.equal(torch.rand(3), wanted)


def test_loading_the_advisor_leaves_the_random_numbers_of_the_caller() -> None:
    import torch

    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    shipped.cache_clear()
    shipped()
    assert torch.equal(torch.rand(3), wanted)


def test_the_advisor_that_comes_with_esper_widens_a_tiny_host_at_a_low_price_only() -> (
    None
):
    tiny = facts(1, samples=800)
    assert shipped().choose(tiny, price=0.5) > 1
    assert shipped().choose(tiny, price=50.0) == 1
    assert shipped().choose(facts(64, samples=50), price=4.0) == 1


def test_it_says_what_it_expects_and_what_that_costs(advisor) -> None:
    words = advisor.words(facts(2), price=1.0)
    assert words.startswith("the advisor expects +")
    assert words.endswith("they grow")
    assert advisor.words(facts(2), price=50.0).endswith("nothing grows")
    assert "no multiple" in advisor.words(facts(2, factors=(1,)), price=1.0)
