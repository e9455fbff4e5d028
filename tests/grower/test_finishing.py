"""The end of growth: what is kept stays, all else goes, and what would change the model is refused."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.optim.swa_utils import AveragedModel

from esper.grower.finishing import finish
from esper.hosts.seed_hook import CONTAINER, hooks_of
from tests.grower.loops import GROWS, Loop, net


def test_kept_seeds_are_parts_of_the_model_and_of_its_averages_and_no_other_hook_stays() -> (
    None
):
    loop = Loop()
    average = AveragedModel(loop.model)
    loop.run()
    assert loop.grower is not None
    assert finish(loop.grower.hooks) == {}
    for network in (loop.model, average.module):
        assert [hook.name for _, _, hook in hooks_of(network)] == ["r0c0"]
        assert any(CONTAINER in name for name, _ in network.named_parameters())
    assert not loop.model._forward_pre_hooks


def test_a_model_without_kept_seeds_is_as_it_was() -> None:
    loop = Loop().run(3)
    assert loop.grower is not None
    loop.grower.finish()
    assert not list(hooks_of(loop.model))
    assert loop.model.state_dict().keys() == net().state_dict().keys()
    assert not any(CONTAINER in name for name, _ in loop.model.named_modules())


def test_a_model_that_cannot_run_on_its_last_batch_is_finished_with_a_warning_and_not_merged() -> (
    None
):
    class TrainsOnly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.wanted = net(), True

        def forward(self, x: Any) -> Any:
            if not self.training and not self.wanted:
                raise RuntimeError("it has no eval mode")
            return self.net(x)

    model = TrainsOnly()
    loop = Loop(
        model=model,
        controller=GROWS,
        sites={"r0c0": "net.body.0", "r0c1": "net.body.2"},
    ).run()
    assert loop.grower is not None
    model.wanted = False
    with pytest.warns(UserWarning, match="cannot run on its last batch"):
        loop.grower.finish(merge=True)
    assert [hook.name for _, _, hook in hooks_of(model)] == ["r0c0"], (
        "it stays as it is"
    )
