"""Errors of executors: their place, and several errors as one."""

from __future__ import annotations

from esper.training.executor import HostError, merged


class Place:
    epoch, batch = 3, 7

    def __init__(self, index: int) -> None:
        self.index = index


def test_an_error_names_its_env_epoch_and_batch() -> None:
    cause = ValueError("bad")
    error = HostError(Place(2), cause)
    assert str(error) == "env 2, epoch 3, batch 7: ValueError: bad"
    assert (error.env, error.epoch, error.batch, error.__cause__) == (2, 3, 7, cause)


def test_several_errors_become_the_first_one_with_the_causes_of_all() -> None:
    causes = [ValueError("a"), KeyError("b"), OSError("c")]
    first, *others = (
        HostError(Place(index), cause) for index, cause in enumerate(causes)
    )
    assert merged([first, *others]) is first
    assert first.causes == tuple(causes)
    assert first.__notes__ == [f"It was not the only one: {other}" for other in others]
    assert first.env == 0
