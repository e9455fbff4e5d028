"""Operations that torch does not have are not requested."""

from __future__ import annotations

import pytest
import torch

from esper.lifecycle.stage import SeedStage as S
from tests.core_helpers import plant, train
from tests.training.byte_images import byte_digits
from tests.training.test_foreign_hosts import training_of


@pytest.mark.parametrize("incubation", ["shadow", "ste"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_norm_seed_is_incubated_in_a_host_whose_features_are_in_channels_last(
    precision: str, incubation: str
) -> None:
    training = training_of(
        byte_digits(), task={"precision": precision}, env={"incubation": incubation}
    )
    born = [
        plant(training, slot.name, "norm", stage=S.TRAINING) for slot in training.sites
    ]
    before = [
        [p.detach().clone() for p in slot.seed.parameters()]
        for slot in born
        if slot.seed
    ]
    train(training)
    for slot, old in zip(born, before, strict=True):
        assert slot.planted is not None
        assert bool(slot.planted.finite)
        assert all(
            not torch.equal(a, b)
            for a, b in zip(old, slot.planted.module.parameters(), strict=True)
        )
