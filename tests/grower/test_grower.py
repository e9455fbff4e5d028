"""A Grower in loops as users write them: what grows, what stays, and what is refused."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from esper.config import ConfigError
from esper.grower.grower import Grower
from esper.lifecycle.stage import SeedStage
from tests.grower.loops import GROW, SITES, Loop, Net, X, Y, net, plain, plant, same, scores, script, weights


def stages(loop: Loop, slot: str = "r0c0") -> list[str]:
    return [step.slots[slot].stage for step in loop.steps]


def test_a_seed_goes_through_its_life_in_a_loop_of_ones_own() -> None:
    loop = Loop().run()
    assert stages(loop) == (["GERMINATED", *["TRAINING"] * 3, *["BLENDING"] * 4, "HOLDING", *["FOSSILIZED"] * 5])
    assert [step.epoch for step in loop.steps] == list(range(1, 15))
    assert [step.done for step in loop.steps] == [False] * 13 + [True]
    assert loop.grower is not None
    assert loop.grower.kept == {"r0c0": "mlp_small"}


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
    assert step.alone == step.committed == pytest.approx(without)
    assert slot.contribution == pytest.approx(step.score - without)


def test_a_trial_is_scored_with_the_seed_at_its_target() -> None:
    loop = Loop().run(4)
    step = loop.steps[-1]
    assert loop.grower is not None
    with loop.grower.hooks.trying({"r0c0": 1.0}):
        tried = float(scores(loop.model).mean())
    assert step.slots["r0c0"].trial == pytest.approx(tried - step.score)
    assert step.score == step.alone


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


def test_planting_adds_a_group_and_pruning_removes_it_and_its_state() -> None:
    from esper.spaces.action import Op

    actions = {**GROW, 9: (Op.PRUNE, {"slot": "r0c0", "alpha_speed": 0})}
    loop = Loop(lambda p: torch.optim.Adam(p, 0.01), controller=script(actions), lr_factor=0.5, weight_decay=0.125)
    host = set(loop.model.parameters())
    loop.run(9)
    optimizer = loop.optimizer
    first, seed = optimizer.param_groups
    assert seed["lr"] == 0.5 * first["lr"]
    assert (seed["weight_decay"], first["weight_decay"]) == (0.125, 0)
    assert set(optimizer.state) == host | set(seed["params"])
    before = {p: copy.deepcopy(optimizer.state[p]) for p in host}
    loop.run(1)
    assert len(optimizer.param_groups) == 1
    assert set(optimizer.state) == host
    assert stages(loop)[-1] in ("PRUNED", "EMBARGOED")
    assert before.keys() == host


SCHEDULERS = {
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, 14 * 4),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 14 * 4),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=8),
            torch.optim.lr_scheduler.CosineAnnealingLR(o, 40),
        ],
        milestones=[8],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedules_go_on_for_the_host_and_seeds_follow(name: str) -> None:
    rates: list[tuple[float, float]] = []

    def step(loop: Loop, x: Tensor, y: Tensor) -> None:
        plain(loop, x, y)
        groups = loop.optimizer.param_groups
        rates.append((groups[0]["lr"], groups[1]["lr"] if len(groups) > 1 else math.nan))

    Loop(make_scheduler=SCHEDULERS[name], step=step, lr_factor=0.25).run()
    grown = [host for host, _ in rates]
    assert [seed for _, seed in rates[4:]] == [0.25 * host for host in grown[4:]]
    rates.clear()
    Loop(make_scheduler=SCHEDULERS[name], step=step, controller=None).run()
    assert [host for host, _ in rates] == grown


def test_a_scheduler_that_was_not_named_is_refused_before_training() -> None:
    with pytest.raises(ConfigError, match="pass it as scheduler="):
        Loop(make_scheduler=SCHEDULERS["cosine"], scheduler=())


def test_a_scheduler_gets_its_optimizer_back() -> None:
    loop = Loop(make_scheduler=SCHEDULERS["sequence"]).run()
    assert loop.grower is not None
    loop.grower.finish()
    assert loop.scheduler.optimizer is loop.optimizer


def accumulated(loop: Loop, x: Tensor, y: Tensor) -> None:
    """Two halves, clipping of the model's gradients, one step."""
    loop.optimizer.zero_grad()
    for part_x, part_y in zip(x.chunk(2), y.chunk(2), strict=True):
        (nn.functional.cross_entropy(loop.model(part_x), part_y) / 2).backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5)
    loop.optimizer.step()


def test_accumulation_and_clipping_act_on_the_host_as_before() -> None:
    grown = Loop(step=accumulated).run(4)
    alone = Loop(step=accumulated, controller=None).run(4)
    assert same(weights(grown.model), weights(alone.model))
    assert grown.run().grower.kept  # type: ignore[union-attr]


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_scales_seeds_too(fused: bool) -> None:
    """Bits of the seed equal those of a loop without a scaler: a power of two loses nothing."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def scaled(loop: Loop, x: Tensor, y: Tensor) -> None:
        loop.optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(loop.model(x), y)).backward()
        scaler.step(loop.optimizer)
        scaler.update()

    def adam(p: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(p, 0.01, fused=fused)

    one, other = Loop(adam, step=scaled), Loop(adam)
    for loop in (one, other):
        loop.run(6)
        assert loop.grower is not None
    mine, plain_ones = (
        [p.detach() for p in loop.grower.groups.groups["r0c0"]["params"]]  # type: ignore[union-attr]
        for loop in (one, other)
    )
    for p, q in zip(mine, plain_ones, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def shadowed(loop: Loop, x: Tensor, y: Tensor) -> None:
    loop.optimizer.zero_grad()
    nn.functional.cross_entropy(loop.model(x), y).backward()  # type: ignore[no-untyped-call]
    if loop.grower is not None:
        loop.grower.incubate(lambda: nn.functional.cross_entropy(loop.model(x), y))
    loop.optimizer.step()


def test_a_shadow_loss_trains_the_seed_and_changes_no_bit_of_the_model() -> None:
    """Not its weights, its BatchNorm statistics, or the random numbers of its dropout."""
    torch.manual_seed(7)
    grown = Loop(model=net(dropout=0.5), step=shadowed, incubation="shadow").run(4)
    torch.manual_seed(7)
    alone = Loop(model=net(dropout=0.5), step=shadowed, controller=None).run(4)
    assert same(weights(grown.model), weights(alone.model))
    assert grown.grower is not None
    seed = grown.grower.hooks.sites["r0c0"].seed
    assert seed is not None
    before = weights(seed)
    grown.run(1)
    assert not same(weights(seed), before)
    assert grown.run().steps[-1].slots["r0c0"].stage == "FOSSILIZED"


def test_a_shadow_gradient_is_that_of_the_loss_with_the_seed_at_its_target() -> None:
    loop = Loop(step=shadowed, incubation="shadow").run(3)
    assert loop.grower is not None
    site = loop.grower.hooks.sites["r0c0"]
    assert site.seed is not None
    loop.model.train()
    loop.optimizer.zero_grad()
    loop.grower.incubate(lambda: nn.functional.cross_entropy(loop.model(X), Y))
    found = [p.grad.clone() for p in site.seed.parameters() if p.grad is not None]
    with loop.grower.hooks.trying({"r0c0": 1.0}):
        loss = nn.functional.cross_entropy(loop.model(X), Y)
    expected = torch.autograd.grad(loss, list(site.seed.parameters()))
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other)
    assert all(p.grad is None for p in loop.model.parameters())


def test_a_shadow_loss_that_is_never_given_is_missed() -> None:
    with pytest.raises(RuntimeError, match=r"r0c0 has learned nothing: .*call grower\.incubate"):
        Loop(incubation="shadow").run()
    with pytest.raises(RuntimeError, match="needs incubation='shadow'"):
        Loop(step=shadowed).run(1)


def test_a_loop_that_resumes_grows_on_to_the_same_bits() -> None:
    whole = Loop(lambda p: torch.optim.AdamW(p, 0.01), make_scheduler=SCHEDULERS["one cycle"]).run()
    for cut in (1, 2, 4, 6, 9, 11):
        first = Loop(lambda p: torch.optim.AdamW(p, 0.01), make_scheduler=SCHEDULERS["one cycle"]).run(cut)
        assert first.grower is not None
        saved = copy.deepcopy(
            {
                "model": first.model.state_dict(),
                "grower": first.grower.state_dict(),
                "optimizer": first.optimizer.state_dict(),
                "scheduler": first.scheduler.state_dict(),
            }
        )
        second = Loop(lambda p: torch.optim.AdamW(p, 0.01), model=net(seed=5), make_scheduler=SCHEDULERS["one cycle"])
        assert second.grower is not None
        second.model.load_state_dict(saved["model"])
        second.grower.load_state_dict(saved["grower"])
        second.optimizer.load_state_dict(saved["optimizer"])
        second.scheduler.load_state_dict(saved["scheduler"])
        second.epoch = cut
        second.run()
        assert same(weights(second.model), weights(whole.model)), f"cut after {cut} epochs"
        assert second.steps[-1].slots == whole.steps[-1].slots


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
    from torch.utils.checkpoint import checkpoint

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


# --- what is refused ------------------------------------------------------------------------------------------------


def test_a_step_without_training_and_one_too_many_say_so() -> None:
    loop = Loop(epochs=3)
    assert loop.grower is not None
    with pytest.raises(RuntimeError, match=r"has not stepped since the last grower\.step"):
        loop.grower.step(scores)
    loop.run(1)
    with pytest.raises(RuntimeError, match=r"has not stepped since the last grower\.step"):
        loop.grower.step(scores)
    loop.run()
    loop.train()
    with pytest.raises(RuntimeError, match="all 3 epochs are over"):
        loop.grower.step(scores)


def test_a_grower_that_was_never_stepped_says_so() -> None:
    loop = Loop()
    loop.train()
    assert loop.grower is not None
    with pytest.raises(RuntimeError, match="never called"):
        loop.grower.finish()


@pytest.mark.parametrize(
    ("result", "error", "words"),
    [
        (math.nan, ValueError, "epoch 1: evaluate returned a score that is not finite"),
        (torch.tensor([1.0, math.inf]), ValueError, "not finite"),
        (93.5, ValueError, "points="),
        (torch.ones(3, 3), TypeError, r"shape \[3, 3\]"),
        (torch.ones(1), TypeError, "n >= 2"),
        ((1.0, 2.0, 3.0), TypeError, "tuple of 3"),
        ("good", TypeError, "returned str"),
        (None, TypeError, "returned NoneType"),
    ],
)
def test_a_score_that_is_none_says_what_it_should_be(result: object, error: type[Exception], words: str) -> None:
    loop = Loop()
    loop.train()
    assert loop.grower is not None
    with pytest.raises(error, match=words):
        loop.grower.step(lambda _model: result)


@pytest.mark.parametrize(
    "result", [0.5, np.float32(0.5), torch.tensor(0.5), (0.5, 1.0), ([0.0, 1.0], torch.tensor(1.0))]
)
def test_scores_come_in_many_forms(result: object) -> None:
    loop = Loop()
    loop.train()
    assert loop.grower is not None
    assert loop.grower.step(lambda _model: result).score == 0.5


def test_what_cannot_work_is_refused_before_training() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def refused(words: str, **changed: Any) -> None:
        arguments: dict[str, Any] = {
            "model": model,
            "sites": SITES,
            "optimizer": optimizer,
            "horizon": 5,
            "topology": "mlp",
            **changed,
        }
        with pytest.raises(ConfigError, match=words):
            Grower(**arguments)
        assert not any(module._forward_hooks for module in model.modules())
        assert len(optimizer.param_groups) == 1

    refused("no submodule 'bod'", sites={"r0c0": "bod"})
    refused("not of the form r0c0", sites={"one": "body"})
    refused("unknown topology 'rnn'; known: cnn", topology="rnn")
    refused("horizon is 1", horizon=1)
    refused("points is 0", points=0)
    refused("lr_factor is nan", lr_factor=math.nan)
    refused("unknown controller 'huristic'; known", controller="huristic")
    refused("not a torch.optim.Optimizer", optimizer=model)
    refused("one after each of the 5 epochs", baseline=[0.1, 0.2])
    refused("'ste' or 'shadow'", incubation="own")
    refused("the model is compiled", model=torch.compile(model))
    refused("use DistributedDataParallel", model=nn.DataParallel(model))


def test_features_that_no_seed_fits_are_refused_in_the_first_batch() -> None:
    loop = Loop(topology="cnn")
    with pytest.raises(ConfigError, match="cnn seeds need floating-point features with 4 dimensions"):
        loop.train()


def test_a_submodule_that_never_runs_is_named() -> None:
    class Idle(Net):
        def __init__(self) -> None:
            super().__init__()
            self.idle = nn.Linear(3, 3)

    loop = Loop(model=Idle(), sites={"r0c0": "body.0", "r0c1": "idle"})
    loop.train()
    assert loop.grower is not None
    with pytest.raises(ConfigError, match=r"slot r0c1 \(idle\)"):
        loop.grower.step(scores)


def test_stages_are_the_lifecycles() -> None:
    """Names in reports are those of the lifecycle."""
    loop = Loop().run()
    assert set(stages(loop)) <= {stage.name for stage in SeedStage}


def test_the_named_controllers_play() -> None:
    for name in ("heuristic", "random", "none", "pretrained"):
        loop = Loop(controller=name, epochs=8).run()
        assert loop.steps[-1].done
    assert Y.max() == 2


def test_two_ranks_grow_the_same_network(tmp_path: Any) -> None:
    """Decisions are those of rank 0, whatever the others measure."""
    import torch.multiprocessing as mp

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
