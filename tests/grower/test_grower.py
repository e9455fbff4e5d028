"""A Grower in loops as users write them: what grows, and what stays as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.grower.loops import (
    GROW,
    Loop,
    Net,
    X,
    Y,
    plant,
    same,
    scores,
    script,
    stages,
    weights,
)


def test_a_seed_goes_through_its_life_in_a_users_loop() -> None:
    loop = Loop().run()
    assert stages(loop) == (["GERMINATED", *["TRAINING"] * 3, *["BLENDING"] * 4, "HOLDING", *["FOSSILIZED"] * 5])
    assert [step.epoch for step in loop.steps] == list(range(1, 15))
    assert [step.done for step in loop.steps] == [False] * 13 + [True]
    assert loop.grower is not None
    assert loop.grower.kept == {"r0c0": "mlp_small"}


class Frozen(Net):
    """Only the head is trained; the rest stays in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(False)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.body.eval()
        return self


@pytest.mark.parametrize("incubation", ["ste", "shadow"])
def test_a_seed_learns_in_a_frozen_stage_that_stays_in_eval_mode(incubation: str) -> None:
    torch.manual_seed(0)
    model = Frozen()
    before = weights(model.body)

    def step(loop: Loop, x: Tensor, y: Tensor) -> None:
        loop.optimizer.zero_grad()
        nn.functional.cross_entropy(loop.model(x), y).backward()  # type: ignore[no-untyped-call]
        if incubation == "shadow":
            assert loop.grower is not None
            loop.grower.incubate(lambda: nn.functional.cross_entropy(loop.model(x), y))
        loop.optimizer.step()

    loop = Loop(model=model, step=step, incubation=incubation).run(2)
    assert loop.grower is not None
    seed = loop.grower.hooks.sites["r0c0"].seed
    assert seed is not None
    born = weights(seed)
    loop.run(2)
    assert stages(loop)[-1] == "TRAINING"
    assert not any(torch.equal(value, born[name]) for name, value in weights(seed).items())
    loop.run()
    assert loop.grower.kept == {"r0c0": "mlp_small"}
    assert same(weights(model.body), before), "the frozen stage is as it was"
    assert loop.steps[-1].score > loop.steps[-1].without_seeds


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, 0.01),
        lambda p: torch.optim.AdamW(p, 0.01, fused=True),
        lambda p: torch.optim.RMSprop(list(p), 0.01, momentum=0.5),
    ],
    ids=["sgd", "adamw", "fused", "rmsprop"],
)
def test_the_model_trains_to_the_same_bits_until_a_seed_is_blended_in(optimizer: Any) -> None:
    """The seed learns meanwhile, from the same backward pass."""
    grown, alone = Loop(optimizer), Loop(optimizer, controller=None)
    grown.run(4)
    alone.run(4)
    assert grown.steps[-1].slots["r0c0"].stage == "TRAINING"
    assert same(weights(grown.model), weights(alone.model))
    for p, q in zip(grown.model.parameters(), alone.model.parameters(), strict=True):
        assert same(_tensors(grown.optimizer.state[p]), _tensors(alone.optimizer.state[q]))
    assert grown.grower is not None
    (seed,) = grown.grower.groups.groups["r0c0"]["params"][:1]
    before = seed.detach().clone()
    grown.run(1)
    assert not torch.equal(seed, before)
    grown.run(4)
    alone.run(5)
    assert not same(weights(grown.model), weights(alone.model))


@pytest.mark.parametrize("how", ["model.zero_grad", "closure"])
def test_loops_that_clear_the_model_only_or_pass_a_closure_grow_the_same(how: str) -> None:
    def take(loop: Loop, x: Tensor, y: Tensor) -> None:
        def closure() -> Tensor:
            loop.model.zero_grad()
            loss = nn.functional.cross_entropy(loop.model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        if how == "closure":
            loop.optimizer.step(closure)
        else:
            closure()
            loop.optimizer.step()

    one, other = Loop(step=take).run(), Loop().run()
    assert one.steps == other.steps
    assert same(weights(one.model), weights(other.model))


def _tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {key: torch.as_tensor(value) for key, value in state.items() if value is not None}


def test_finish_returns_the_model_with_ordinary_submodules() -> None:
    loop = Loop(controller=script({**GROW, 10: plant("r0c1")})).run()
    expected = scores(loop.model)
    assert loop.grower is not None
    logits = loop.model.eval()(X)
    network = loop.grower.finish()
    assert network is loop.model
    assert torch.equal(scores(network), expected)
    torch.testing.assert_close(network.eval()(X), logits)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())
    assert len(loop.optimizer.param_groups) == 2, "the host's and that of the kept seed"
    other = copy.deepcopy(network)
    for p in other.parameters():
        nn.init.zeros_(p)
    other.load_state_dict(network.state_dict())
    torch.testing.assert_close(other(X), logits)


def test_a_site_that_returns_a_tuple_grows_on_its_first_tensor() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.head = nn.GRU(2, 12, batch_first=True), nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.gru(x.view(len(x), 4, 2))[0][:, -1])  # type: ignore[no-any-return]

    torch.manual_seed(0)
    loop = Loop(model=Recurrent(), sites={"r0c0": "gru"}, topology="transformer").run()
    assert loop.grower is not None
    logits = loop.model.eval()(X)
    assert loop.grower.kept == {"r0c0": "mlp_small"}
    torch.testing.assert_close(loop.grower.finish().eval()(X), logits)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_trains_the_same_network(reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = checkpoint(self.body[:3], x.clone().requires_grad_(), use_reentrant=reentrant)
            return self.head(self.body[3:](h))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    loop, direct = Loop(model=Checkpointed()).run(), Loop().run()
    assert same(weights(loop.model), weights(direct.model))


def test_the_named_controllers_play() -> None:
    for name in ("heuristic", "random", "none", "pretrained"):
        loop = Loop(controller=name, epochs=8).run()
        assert loop.steps[-1].done
    assert Y.max() == 2
