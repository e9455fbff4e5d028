"""GroupNorm on channels_last features that need no gradient, which end the process without a guard."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import nn

from esper.lifecycle.ramps import STYLES
from esper.seeds.blueprints import BLUEPRINTS, BlueprintRegistry
from esper.seeds.features import Features
from esper.seeds.group_norm import guard_group_norm
from esper.seeds.place import Place
from esper.seeds.site import Site

CRASHES = """
import torch
from esper.seeds.group_norm import guard_group_norm
layer, x = torch.nn.GroupNorm(1, 8), torch.randn(4, 8, 4, 4).contiguous(memory_format=torch.channels_last)
guard_group_norm(layer)
layer(x).square().sum().backward()
print(float(layer.weight.grad.norm()) > 0)
"""


def test_group_norm_on_features_in_channels_last_that_need_no_gradient_does_not_end_the_process() -> (
    None
):
    done = subprocess.run(
        [sys.executable, "-c", CRASHES], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip()) == (0, "True")


def test_a_guarded_layer_computes_what_it_did() -> None:
    torch.manual_seed(0)
    layer, x = nn.GroupNorm(2, 8), torch.randn(4, 8, 4, 4)
    inputs = {
        "plain": x,
        "channels_last": x.contiguous(memory_format=torch.channels_last),
    }
    wanted = layer(x)
    guard_group_norm(layer)
    for h in inputs.values():
        torch.testing.assert_close(layer(h), wanted)
        assert torch.equal(layer(input=h), layer(h))
        with torch.inference_mode():
            assert (
                layer(h).stride() == h.stride()
            )  # nothing is laid out anew where nothing is wrong
        assert layer(h.clone().requires_grad_()).stride() == h.stride()


SEEDS = """
import torch
from torch import nn
from esper.hosts.seed_hook import attach
from esper.lifecycle.ramps import STYLES
from esper.seeds.blueprints import BLUEPRINTS
from esper.seeds.features import Features
from esper.seeds.place import Place
from esper.seeds.site import Site
x = torch.randn(4, 8, 4, 4).contiguous(memory_format=torch.channels_last)
for name in BLUEPRINTS.names("cnn"):
    probe = Features.at_sink(x)
    seed = Site(Place("r0c0", 8)).plant(BLUEPRINTS.get("cnn", name), STYLES["LINEAR_ADD"], probe).module
    seed(x).square().sum().backward()  # beside a network, in any loop
    model = nn.Sequential(nn.Identity())
    attach(model, {"0": ("r0c0", seed, 0.5)})
    model.train()(x).square().sum().backward()  # kept in a network whose layers before it are frozen
print("done")
"""


def test_every_seed_is_guarded_wherever_it_is_planted() -> None:
    done = subprocess.run([sys.executable, "-c", SEEDS], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "done")


def test_a_norm_inside_a_body_of_a_users_own_is_guarded() -> None:
    registry = BlueprintRegistry()

    @registry.register("cnn", "pooled", parameters=lambda c: 2 * c)
    def pooled(channels: int) -> nn.Module:
        """A norm that is not the first layer."""
        return nn.Sequential(nn.Identity(), nn.Sequential(nn.GroupNorm(1, channels)))

    site = Site(Place("r0c0", 8))
    probe = Features.at_sink(torch.randn(2, 8, 4, 4))
    seed = site.plant(registry.get("cnn", "pooled"), STYLES["LINEAR_ADD"], probe).module
    assert seed.get_submodule("body.1.0")._forward_pre_hooks
    assert BLUEPRINTS.names("cnn")
