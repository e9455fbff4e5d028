"""A Grower in loops as users write them: what grows, and what stays as it was."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from esper.lifecycle.stage import SeedStage
from tests.grower.loops import (
    GROW,
    Loop,
    Net,
    X,
    Y,
    net,
    plain,
    plant,
    same,
    scores,
    script,
    stages,
    weights,
)


def test_a_seed_goes_through_its_life_in_a_loop_of_ones_own() -> None:
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


def test_scores_are_those_of_the_networks_that_are_named() -> None:
    """All seeds, kept seeds, none; a contribution is the difference to the model without the seed."""
    loop = Loop().run(9)
    step, slot = loop.steps[-1], loop.steps[-1].slots["r0c0"]
    assert slot.stage == "HOLDING"
    assert step.score == pytest.approx(float(scores(loop.model).mean()))
    assert loop.grower is not None
    with loop.grower.hooks.trying({}):
        without = float(scores(loop.model).mean())
    assert step.without_seeds == step.committed == pytest.approx(without)
    assert slot.contribution == pytest.approx(step.score - without)


def test_a_trial_is_scored_with_the_seed_at_its_target() -> None:
    loop = Loop().run(4)
    step = loop.steps[-1]
    assert loop.grower is not None
    with loop.grower.hooks.trying({"r0c0": 1.0}):
        tried = float(scores(loop.model).mean())
    assert step.slots["r0c0"].trial == pytest.approx(tried - step.score)
    assert step.score == step.without_seeds


def test_evaluate_runs_once_for_each_network_and_modes_are_restored() -> None:
    calls = []

    def counted(model: nn.Module) -> Tensor:
        calls.append(1)
        return scores(model)

    loop = Loop()
    assert loop.grower is not None
    numbers = []
    for _ in range(9):
        loop.train()
        loop.model.body[3].eval()
        calls.clear()
        loop.grower.step(counted)
        numbers.append(len(calls))
        assert loop.model.training
        assert not loop.model.body[3].training
    assert numbers == [1, 1, 2, 2, 2, 2, 2, 2, 2]


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


def test_a_seed_that_becomes_non_finite_is_cut_and_the_model_survives() -> None:
    loop = Loop().run(4)
    assert loop.grower is not None
    with torch.no_grad():
        loop.grower.groups.groups["r0c0"]["params"][0].fill_(math.nan)
    loop.run(1)
    assert stages(loop)[-1] in ("PRUNED", "EMBARGOED")
    assert all(bool(p.isfinite().all()) for p in loop.model.parameters())
    assert len(loop.optimizer.param_groups) == 1


def test_a_loop_that_starts_early_plants_before_its_first_epoch() -> None:
    loop, usual = Loop(early=True).run(), Loop().run()
    assert [step.epoch for step in loop.steps] == list(range(15))
    assert [step.epoch for step in usual.steps] == list(range(1, 15))
    assert stages(loop) == [*stages(usual), stages(usual)[-1]]  # each an epoch earlier
    assert [step.done for step in loop.steps] == [False] * 14 + [True]


def test_a_loop_that_starts_early_trains_the_same_bits_until_a_seed_is_blended_in() -> None:
    early, alone = Loop(early=True).run(5), Loop(controller=None).run(5)
    assert stages(early)[-1] == "BLENDING"
    early, alone = Loop(early=True).run(4), Loop(controller=None).run(4)
    assert same(weights(early.model), weights(alone.model))


def test_the_baseline_of_a_loop_that_starts_early_begins_with_its_own_first_score() -> None:
    baseline = [0.5 + 0.01 * epoch for epoch in range(14)]
    early, usual = Loop(early=True, baseline=baseline).run(), Loop(baseline=baseline).run()
    for loop, first in ((early, (early.steps[0].score,)), (usual, ())):
        assert loop.grower is not None
        assert loop.grower.env is not None
        assert loop.grower.env.rules is not None
        expected = [100 * score for score in (*first, *baseline)]
        assert loop.grower.env.rules.baseline.accuracy == pytest.approx(expected)


def test_evaluate_may_forbid_gradients_before_the_first_epoch() -> None:
    loop = Loop()
    assert loop.grower is not None
    step = loop.grower.start(torch.inference_mode()(scores))
    assert step.action is not None
    assert step.action.accepted
    loop.run(14)
    assert stages(loop)[-1] == "FOSSILIZED"


# --- what is refused ------------------------------------------------------------------------------------------------


def test_stages_are_the_lifecycles() -> None:
    """Names in reports are those of the lifecycle."""
    loop = Loop().run()
    assert set(stages(loop)) <= {stage.name for stage in SeedStage}


def test_the_named_controllers_play() -> None:
    for name in ("heuristic", "random", "none", "pretrained"):
        loop = Loop(controller=name, epochs=8).run()
        assert loop.steps[-1].done
    assert Y.max() == 2


@pytest.mark.slow
def test_two_ranks_grow_the_same_network(tmp_path: Any) -> None:
    """Decisions are those of rank 0, whatever the others measure."""
    mp.spawn(_rank, (str(tmp_path / "store"), str(tmp_path)), nprocs=2)  # type: ignore[no-untyped-call]
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert one["stages"] == other["stages"]
    assert one["stages"][-1] == "FOSSILIZED"
    assert same(one["weights"], other["weights"])


def _rank(rank: int, store: str, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    loop = Loop(model=DistributedDataParallel(net()))
    assert loop.grower is not None
    for _ in range(loop.epochs):
        loop.model.train()
        for rows in torch.arange(64).split(16):
            plain(loop, X[rows][rank::2], Y[rows][rank::2])
        loop.steps.append(loop.grower.step(lambda model: scores(model) * (1 if rank == 0 else 0.1)))
    network = loop.grower.finish()
    torch.save(
        {"weights": {name: p.detach() for name, p in network.named_parameters()}, "stages": stages(loop)},
        f"{folder}/{rank}.pt",
    )
    torch.distributed.destroy_process_group()
