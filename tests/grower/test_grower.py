"""A Grower in loops as users write them: what grows, and what stays as it was."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from esper.agents.advised import AdvisedController
from esper.grower.grower import Grower
from esper.hosts.container import CONTAINER
from esper.hosts.seed_hook import hooks_of
from tests.grower.loops import (
    GROW,
    Loop,
    Net,
    X,
    Y,
    net,
    plant,
    same,
    scores,
    script,
    stages,
    weights,
)


def test_a_seed_goes_through_its_life_in_a_users_loop() -> None:
    loop = Loop().run()
    assert stages(loop) == (
        [
            "GERMINATED",
            *["TRAINING"] * 3,
            *["BLENDING"] * 4,
            "HOLDING",
            *["FOSSILIZED"] * 5,
        ]
    )
    assert [step.epoch for step in loop.steps] == list(range(1, 15))
    assert [step.done for step in loop.steps] == [False] * 13 + [True]
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
def test_a_seed_learns_in_a_frozen_stage_that_stays_in_eval_mode(
    incubation: str,
) -> None:
    torch.manual_seed(0)
    model = Frozen()
    before = weights(model.body)

    def step(loop: Loop, x: Tensor, y: Tensor) -> None:
        loop.optimizer.zero_grad()
        nn.functional.cross_entropy(loop.model(x), y).backward()  # type: ignore[no-untyped-call]
        if incubation == "shadow":
            loop.grower.incubate(lambda: nn.functional.cross_entropy(loop.model(x), y))
        loop.optimizer.step()

    loop = Loop(model=model, step=step, incubation=incubation).run(2)
    seed = loop.grower.hooks.sites["r0c0"].seed
    assert seed is not None
    born = weights(seed)
    loop.run(2)
    assert stages(loop)[-1] == "TRAINING"
    assert not any(
        torch.equal(value, born[name]) for name, value in weights(seed).items()
    )
    loop.run()
    assert loop.grower.kept == {"r0c0": "mlp_small"}
    assert same(weights(model.body), before), "the frozen stage is as it was"
    assert loop.steps[-1].score > loop.steps[-1].without_seeds


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.AdamW(p, 0.01, fused=True),
        lambda p: torch.optim.RMSprop(list(p), 0.01, momentum=0.5),
    ],
    ids=["fused", "rmsprop"],
)
def test_the_model_trains_to_the_same_bits_until_a_seed_is_blended_in(
    optimizer: Any,
) -> None:
    """The seed learns meanwhile, from the same backward pass."""
    grown, alone = Loop(optimizer), Loop(optimizer, controller=None)
    grown.run(4)
    alone.run(4)
    assert grown.steps[-1].slots["r0c0"].stage == "TRAINING"
    assert same(weights(grown.model), weights(alone.model))
    for p, q in zip(grown.model.parameters(), alone.model.parameters(), strict=True):
        assert same(
            _tensors(grown.optimizer.state[p]), _tensors(alone.optimizer.state[q])
        )
    (seed,) = grown.grower.groups.groups["r0c0"]["params"][:1]
    before = seed.detach().clone()
    grown.run(1)
    assert not torch.equal(seed, before)
    grown.run(4)
    alone.run(5)
    assert not same(weights(grown.model), weights(alone.model))


@pytest.mark.parametrize("how", ["model.zero_grad", "closure"])
def test_loops_that_clear_the_model_only_or_pass_a_closure_grow_the_same(
    how: str,
) -> None:
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
    return {
        key: torch.as_tensor(value) for key, value in state.items() if value is not None
    }


def test_finish_returns_the_model_with_its_kept_seeds_and_all_that_it_was() -> None:
    loop = Loop(controller=script({**GROW, 10: plant("r0c1")}))
    modules, keys = dict(loop.model.named_modules()), list(loop.model.state_dict())
    loop.run()
    expected = scores(loop.model)
    logits = loop.model.eval()(X)
    network = loop.grower.finish()
    assert network is loop.model
    assert torch.equal(scores(network), expected)
    assert torch.equal(network.eval()(X), logits)
    assert all(
        network.get_submodule(path) is module for path, module in modules.items()
    )
    own = [key for key in network.state_dict() if CONTAINER not in key]
    assert own == keys
    assert [(path, hook.name) for path, _, hook in hooks_of(network)] == [
        ("body.0", "r0c0")
    ]
    assert not network._forward_pre_hooks
    assert len(loop.optimizer.param_groups) == 2, "the host's and that of the kept seed"
    other = copy.deepcopy(network)
    for p in other.parameters():
        nn.init.zeros_(p)
    other.load_state_dict(network.state_dict())
    assert torch.equal(other(X), logits)


def test_a_difference_at_the_end_is_an_error_and_the_model_stays_as_it_was() -> None:
    class Counts(Net):
        """Computes something else with other parameters, in the end."""

        counts = False

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (
                len(list(self.parameters())) if self.counts else 1
            )

    torch.manual_seed(0)
    loop = Loop(model=Counts()).run()
    loop.model.counts = True  # type: ignore[assignment]
    logits, keys = loop.model.eval()(X), list(loop.model.state_dict())
    with pytest.raises(RuntimeError, match=r"rolled back: .* changes .*can continue"):
        loop.grower.finish()
    assert torch.equal(loop.model(X), logits)
    assert list(loop.model.state_dict()) == keys
    assert loop.grower.kept == {"r0c0": "mlp_small"}


def test_two_passes_before_a_backward_pass_and_penalties_on_gradients_train() -> None:
    def take(loop: Loop, x: Tensor, y: Tensor) -> None:
        loop.optimizer.zero_grad()
        x = x.clone().requires_grad_()
        one, two = loop.model(x), loop.model(x.flip(1))
        loss = (
            nn.functional.cross_entropy(one, y)
            + (one.softmax(1) - two.softmax(1)).square().mean()
        )
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward(retain_graph=True)  # type: ignore[no-untyped-call]
        loop.optimizer.step()

    grown = Loop(step=take).run()
    assert grown.steps[-1].slots["r0c0"].stage == "FOSSILIZED"
    one, two = Loop(step=take).run(4), Loop(step=take, controller=None).run(4)
    assert same(weights(one.model), weights(two.model))


def test_a_network_that_is_frozen_as_a_whole_grows() -> None:
    model = net().requires_grad_(False)
    before = weights(model)
    loop = Loop(model=model, early=True).run(3)
    seed = loop.grower.hooks.sites["r0c0"].seed
    assert seed is not None
    before_learning = weights(seed)
    loop.run(6)
    assert not same(weights(seed), before_learning)
    parameters = dict(model.named_parameters())
    assert all(torch.equal(parameters[name], before[name]) for name in parameters)
    assert all(p.grad is None for p in model.parameters())


def test_a_site_that_runs_without_gradients_is_an_error_that_names_it() -> None:
    class Frozen(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                h = self.body(x)
            return self.head(h)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    loop = Loop(model=Frozen())
    with pytest.raises(
        RuntimeError, match=r"r0c0 \(body\.0\) has learned nothing, .*torch\.no_grad"
    ):
        loop.run()
    assert len(loop.steps) == 2, "after the first epoch in which it should have learned"


def test_a_score_that_changes_when_nothing_did_is_said_once() -> None:
    chance = torch.Generator().manual_seed(0)
    loop = Loop(epochs=5)
    grower = loop.grower

    def run() -> None:
        for _ in range(5):
            loop.train()
            grower.step(lambda model: float(torch.rand((), generator=chance)))

    with pytest.warns(
        UserWarning, match="for the same network: differences .* are noise"
    ) as said:
        run()
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Loop(epochs=5).run()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_trains_the_same_network(reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = checkpoint(
                self.body[:3], x.clone().requires_grad_(), use_reentrant=reentrant
            )
            return self.head(self.body[3:](h))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    loop, direct = Loop(model=Checkpointed()).run(), Loop().run()
    assert same(weights(loop.model), weights(direct.model))


def test_the_named_controllers_play() -> None:
    for name in ("heuristic", "random", "none", "pretrained"):
        loop = Loop(controller=name, epochs=8).run()
        assert loop.steps[-1].done
    assert Y.max() == 2


@pytest.mark.parametrize(
    ("merge", "config", "merged"),
    [(None, {}, True), (False, {}, False), (None, {"env": {"merge": False}}, False)],
)
def test_new_units_of_neighbouring_layers_get_weights_between_them_unless_asked_otherwise(
    merge: bool | None, config: dict[str, Any], merged: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 12)
    y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    model = nn.Sequential(
        *(nn.Linear(12, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 4))
    )
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    known = {"samples": loader, "classes": 4, "price": 0.0}
    sites = ["0 -> 2", "2 -> 4"]
    grower = Grower(
        model, sites, optimizer, horizon=3, merge=merge, config=config, **known
    )

    def score(network: nn.Module) -> torch.Tensor:
        return (network(x).argmax(1) == y).float()

    grower.start(score)
    for _ in range(3):
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        grower.step(score)
    network = grower.finish(merge=True, quiet=True)
    assert network[2].out_features > 2
    assert bool((network[2].weight[2:, 2:] != 0).any()) == merged


def test_an_advisor_decides_if_the_loader_and_the_classes_are_known() -> None:
    """The price is an argument: where it is too high, nothing grows."""
    x = torch.randn(64, 12)
    y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    grown = {}
    for price in (0.0, 1e6):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 2), nn.ReLU(), nn.Linear(2, 4))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        grower = Grower(
            model,
            ["0 -> 2"],
            optimizer,
            horizon=3,
            samples=loader,
            classes=4,
            price=price,
        )

        def score(network: nn.Module) -> torch.Tensor:
            return (network(x).argmax(1) == y).float()

        grower.start(score)
        for _ in range(3):
            model.train()
            for inputs, labels in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
            grower.step(score)
        assert isinstance(grower.controller, AdvisedController)
        grown[price] = grower.finish(merge=True)[0].out_features  # type: ignore[index]
    assert grown[0.0] in (4, 8, 16, 32)
    assert grown[1e6] == 2


@pytest.mark.parametrize("known", [{"samples": 64, "classes": 4}, {"classes": 4}, {}])
def test_a_rule_decides_if_the_advisor_cannot_know_enough(
    known: dict[str, int],
) -> None:
    model = nn.Sequential(nn.Linear(12, 2), nn.ReLU(), nn.Linear(2, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    grower = Grower(model, ["0 -> 2"], optimizer, horizon=3, **known)
    assert grower.config.env.blueprints is None
    assert grower.config.reward.mode == "shaped"
    grower.close()
