"""The accumulators: rows of one buffer, written by `accumulate_` and `cross_entropy_into`."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch

from esper.ops.accumulators import ACCUMULATOR_FIELDS, Accumulators, accumulate_
from esper.ops.cross_entropy import cross_entropy, cross_entropy_into
from tests.ops.test_cross_entropy import sample

COPIES = [
    copy.deepcopy,
    lambda one: pickle.loads(pickle.dumps(one)),
    lambda one: copy.deepcopy({"a": [one]})["a"][0],
]


def test_accumulate_adds_to_one_row() -> None:
    accumulators = Accumulators(envs=3, configurations=2)
    first = cross_entropy(*sample(20, 10, seed=1)).stats
    second = cross_entropy(*sample(30, 10, seed=2)).stats
    accumulate_(accumulators, 1, first)
    accumulate_(accumulators, 1, second)
    accumulate_(accumulators, 2, second, configuration=1)
    expected = torch.zeros(3, 2, 5, dtype=torch.float64)
    expected[1, 0] = first + second
    expected[2, 1] = second
    assert torch.equal(accumulators.block, expected)


@pytest.mark.parametrize(
    ("classes", "dtype"), [(10, torch.float32), (100, torch.bfloat16)]
)
def test_into_writes_what_the_functional_form_returns(
    classes: int, dtype: torch.dtype
) -> None:
    accumulators = Accumulators(envs=2, configurations=3, samples=50)
    results = []
    for first in (0, 20):
        logits, targets = sample(20, classes, dtype=dtype, seed=first)
        logits.requires_grad_()
        cross_entropy_into(
            logits, targets, accumulators, 1, 2, first, label_smoothing=0.1
        )
        results.append(cross_entropy(logits, targets, label_smoothing=0.1))
    expected = torch.zeros(2, 3, 5, dtype=torch.float64)
    expected[1, 2] = results[0].stats + results[1].stats
    assert torch.equal(accumulators.block, expected)
    correct = torch.zeros(2, 3, 50, dtype=torch.uint8)
    correct[1, 2, :40] = torch.cat([result.correct for result in results])
    assert torch.equal(accumulators.correct, correct)
    assert correct.any()


def test_into_counts_the_right_tokens_of_each_sequence() -> None:
    accumulators = Accumulators(envs=2, samples=7, dtype=torch.int16)
    logits, targets = sample(4, 300, 5)
    cross_entropy_into(logits, targets, accumulators, 1, first=3)
    result = cross_entropy(logits, targets)
    assert accumulators.correct.dtype == torch.int16
    expected = torch.zeros(2, 1, 7, dtype=torch.int16)
    expected[1, 0, 3:] = result.correct.sum(dim=1)
    assert torch.equal(accumulators.correct, expected)
    assert torch.equal(accumulators.block[1, 0], result.stats)
    assert expected.max() > 30


def test_without_first_no_sample_is_written() -> None:
    accumulators = Accumulators(envs=1, samples=4)
    cross_entropy_into(*sample(20, 10), accumulators, 0)
    assert not accumulators.correct.any()
    assert accumulators.block[0, 0, ACCUMULATOR_FIELDS.index("batches")].item() == 1


def test_results_are_overwritten_and_statistics_added() -> None:
    accumulators = Accumulators(envs=1, samples=20)
    case = sample(20, 10)
    cross_entropy_into(*case, accumulators, 0, first=0)
    once = accumulators.read()
    cross_entropy_into(*case, accumulators, 0, first=0)
    assert torch.equal(accumulators.correct, once.correct)
    assert torch.equal(accumulators.block, 2 * once.block)


def test_read_is_a_copy() -> None:
    accumulators = Accumulators(envs=2, configurations=2, samples=3, dtype=torch.int16)
    copy = accumulators.read()
    accumulators.block.fill_(1.0)
    accumulators.correct.fill_(2)
    assert not copy.block.any()
    assert not copy.correct.any()
    again = accumulators.read()
    assert torch.equal(again.block, accumulators.block)
    assert torch.equal(again.correct, accumulators.correct)


@pytest.mark.parametrize("sizes", [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_impossible_sizes(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="accumulators need envs >= 1"):
        Accumulators(*sizes)


@pytest.mark.parametrize(
    ("env", "configuration", "first", "message"),
    [
        (2, 0, 0, r"env 2 is outside 0\.\.1"),
        (-1, 0, 0, r"env -1 is outside 0\.\.1"),
        (0, 3, 0, r"configuration 3 is outside 0\.\.2"),
        (0, 0, 5, r"samples 5\.\.14 are outside a row of 12"),
        (0, 0, -1, r"samples -1\.\.8 are outside a row of 12"),
    ],
)
def test_a_row_outside_the_accumulators_is_refused(
    env: int, configuration: int, first: int, message: str
) -> None:
    accumulators = Accumulators(envs=2, configurations=3, samples=12)
    with pytest.raises(RuntimeError, match=message):
        cross_entropy_into(*sample(10, 4), accumulators, env, configuration, first)
    assert not accumulators.block.any()
    if first == 0:
        with pytest.raises(RuntimeError, match=message):
            accumulate_(
                accumulators, env, cross_entropy(*sample(10, 4)).stats, configuration
            )


def test_accumulators_for_other_logits_are_refused() -> None:
    with pytest.raises(
        RuntimeError, match=r"correct must be contiguous int16 .counts per sequence"
    ):
        cross_entropy_into(*sample(2, 3, 4), Accumulators(1, samples=9), 0, first=0)
    with pytest.raises(
        RuntimeError, match=r"correct must be contiguous uint8 .for logits \[B, C\]"
    ):
        cross_entropy_into(
            *sample(2, 3), Accumulators(1, samples=9, dtype=torch.int16), 0, first=0
        )
    with pytest.raises(
        RuntimeError, match="a sequence of 32768 tokens is too long for an int16 count"
    ):
        cross_entropy_into(
            *sample(1, 32_768, 2),
            Accumulators(1, samples=9, dtype=torch.int16),
            0,
            first=0,
        )
    # Without samples, their dtype does not matter.
    cross_entropy_into(*sample(2, 3, 4), Accumulators(1, samples=9), 0)


def test_a_block_of_another_dtype_or_shape_is_refused() -> None:
    operator = torch.ops.esper.accumulate_
    stats = torch.zeros(5, dtype=torch.float64)
    for block in (
        torch.zeros(2, 1, 5),
        torch.zeros(2, 1, 4).double(),
        torch.zeros(2, 5).double(),
    ):
        with pytest.raises(
            RuntimeError,
            match=r"block must be contiguous float64 \[envs, configurations, 5\]",
        ):
            operator(block, 0, 0, stats)


@pytest.mark.parametrize("copied", COPIES)
def test_copies_read_what_is_added_to_them(
    copied: Callable[[Accumulators], Accumulators],
) -> None:
    stats = cross_entropy(torch.randn(4, 3), torch.tensor([0, 1, 2, 0])).stats
    first = Accumulators(2, 1, 4)
    accumulate_(first, 1, stats)
    other = copied(first)
    accumulate_(other, 0, stats)
    assert other.read().block[:, 0, 2].tolist() == [4, 4]
    assert first.read().block[:, 0, 2].tolist() == [0, 4]
    other.correct[1, 0, 2] = 1
    assert other.read().correct[1, 0].tolist() == [0, 0, 1, 0]
