"""Operations that torch does not have are not requested."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from esper.lifecycle.stage import SeedStage as S
from esper.training.host_training import guard_group_norm
from tests.core_helpers import plant, train
from tests.training.byte_images import byte_digits
from tests.training.test_foreign_hosts import training_of

CRASHES = """
import torch
from esper.training.host_training import guard_group_norm
layer, x = torch.nn.GroupNorm(1, 8), torch.randn(4, 8, 4, 4).contiguous(memory_format=torch.channels_last)
guard_group_norm(layer)
layer(x).square().sum().backward()
print(float(layer.weight.grad.norm()) > 0)
"""


def test_group_norm_on_features_in_channels_last_that_need_no_gradient_does_not_end_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", CRASHES], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "True")


def test_a_guarded_layer_computes_what_it_did() -> None:
    torch.manual_seed(0)
    layer, x = nn.GroupNorm(2, 8), torch.randn(4, 8, 4, 4)
    inputs = {"plain": x, "channels_last": x.contiguous(memory_format=torch.channels_last)}
    wanted = layer(x)
    guard_group_norm(layer)
    for h in inputs.values():
        torch.testing.assert_close(layer(h), wanted)
        assert torch.equal(layer(input=h), layer(h))
        with torch.inference_mode():
            assert layer(h).stride() == h.stride()  # nothing is laid out anew where nothing is wrong
        assert layer(h.clone().requires_grad_()).stride() == h.stride()


@pytest.mark.parametrize("incubation", ["shadow", "ste"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_norm_seed_is_incubated_in_a_host_whose_features_are_in_channels_last(
    precision: str, incubation: str
) -> None:
    training = training_of(byte_digits(), task={"precision": precision}, env={"incubation": incubation})
    born = [plant(training, slot.name, "norm", stage=S.TRAINING) for slot in training.sites]
    before = [[p.detach().clone() for p in slot.seed.parameters()] for slot in born if slot.seed]
    train(training)
    for slot, old in zip(born, before, strict=True):
        assert slot.planted is not None
        assert bool(slot.planted.finite)
        assert all(not torch.equal(a, b) for a, b in zip(old, slot.planted.module.parameters(), strict=True))
