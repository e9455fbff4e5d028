"""An epoch of one host: which samples, which rate, which step, and who owns which parameter."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.core.site import Role
from esper.core.stage import SeedStage
from esper.training import step as host_step
from esper.training.host_training import HostTraining
from esper.training.step import prepare_epoch
from esper.training.validate import evaluate
from tests.core_helpers import (
    digits,
    make_training,
    plant,
    rig,
    same_bits,
    tensors_of,
    tiny_config,
    train,
)

S = SeedStage


def batches_of(
    training: HostTraining, monkeypatch: pytest.MonkeyPatch
) -> list[list[Tensor]]:
    """The batches of two epochs."""
    epochs: list[list[Tensor]] = []

    def keep(_env: object, _groups: object, x: Tensor, _y: Tensor) -> None:
        epochs[-1].append(x.clone())

    monkeypatch.setattr(host_step, "train_step", keep)
    for _ in range(2):
        epochs.append([])
        train(training)
    return epochs


@pytest.mark.trap(11)
@pytest.mark.parametrize(
    ("samples", "batch"), [(128, 32), (100, 32), (997, 64), (32, 32)]
)
def test_an_epoch_is_floor_of_full_batches_of_the_hosts_own_permutation(
    samples: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(task={"samples_per_epoch": samples, "batch_size": batch})
    first = batches_of(make_training(config), monkeypatch)
    second = batches_of(make_training(config, index=1), monkeypatch)
    for epoch in (*first, *second):
        assert [len(x) for x in epoch] == [batch] * (samples // batch)
        seen = torch.cat(epoch).flatten(1)
        assert len(torch.unique(seen, dim=0)) == len(seen)  # without replacement
    assert not torch.equal(first[0][0], first[1][0])  # each epoch draws anew
    assert not torch.equal(first[0][0], second[0][0])  # and so does each env


def test_the_learning_rate_falls_as_a_cosine_on_the_hosts_clock_for_seeds_too() -> None:
    training = make_training(tiny_config(horizon=4, task={"learning_rate": 0.2}))
    rates = []
    plant(training, "r0c0")
    for _ in range(4):
        train(training)
        groups = [training.host_group, training.seed_groups["r0c0"]]
        rates.append([float(group.optimizer.param_groups[0]["lr"]) for group in groups])
    expected = [0.2, 0.1 * (1 + math.sqrt(0.5)), 0.1, 0.1 * (1 - math.sqrt(0.5))]
    assert rates == [pytest.approx([rate, rate]) for rate in expected]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_step_is_clipped_sgd_with_momentum_and_decay(smoothing: float) -> None:
    """The step is compared with a twin in plain PyTorch."""
    rates = {"max_grad_norm": 0.3, "learning_rate": 0.1, "schedule": "constant"}
    config = tiny_config(task={**rates, "label_smoothing": smoothing})
    training = make_training(config)
    twin = digits().build_host()
    twin.load_state_dict(training.host.state_dict())
    twin.train()
    optimizer = torch.optim.SGD(
        twin.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4
    )
    prepare_epoch(training)
    split = digits().train
    clipped = 0
    for batch in range(6):
        x, y = (
            split.x[batch * 32 : (batch + 1) * 32],
            split.y[batch * 32 : (batch + 1) * 32],
        )
        host_step.train_step(training, [training.host_group], x, y)
        optimizer.zero_grad()
        F.cross_entropy(twin(x), y, label_smoothing=smoothing).backward()  # type: ignore[no-untyped-call]
        clipped += float(nn.utils.clip_grad_norm_(twin.parameters(), 0.3)) > 0.3
        optimizer.step()
    assert clipped > 0
    for mine, theirs in zip(training.host.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_labels_are_smoothed_in_training_and_shadow_losses_and_not_in_validation() -> (
    None
):
    x, y = digits().train.x[:64], digits().train.y[:64]
    trained, alike = [], []
    for smoothing in (0.0, 0.2):
        training = make_training(
            tiny_config(task={"learning_rate": 1e-30, "label_smoothing": smoothing})
        )
        plant(training, "r0c0")
        training.assign(training.sites[0], Role.INCUBATING, 0.0, 1.0, learning=True)
        groups = prepare_epoch(training)
        for group in groups:
            group.drop_gradients()
        host_step.add_gradients(training, x, y, None)
        trained.append(
            [
                p.grad.norm()
                for group in groups
                for p in group.parameters
                if p.grad is not None
            ]
        )
        alike.append(
            float(
                evaluate(
                    training, digits().validation, [(0.0,) * len(training.sites)]
                ).loss[0]
            )
        )
    assert len(trained[0]) > len(
        list(digits().build_host().parameters())
    )  # also the seed's
    assert not any(torch.equal(*pair) for pair in zip(*trained, strict=True))
    assert alike[0] == alike[1]


def test_the_row_holds_loss_sum_correct_count_and_bad_losses() -> None:
    training = make_training(
        tiny_config(
            task={"learning_rate": 1e-30, "samples_per_epoch": 64, "batch_size": 64}
        )
    )
    order = torch.Generator()
    order.set_state(training.order.get_state())
    rows = torch.randperm(997, generator=order)[:64]
    x, y = digits().train.x[rows], digits().train.y[rows]
    training.host.train()
    logits = training.host(x)
    train(training)
    loss_sum, correct, count, batches, bad = training.totals.training.tolist()
    assert loss_sum / 64 == pytest.approx(F.cross_entropy(logits, y).item(), rel=1e-5)
    assert (correct, count, batches, bad) == (
        int((logits.argmax(1) == y).sum()),
        64,
        1,
        0,
    )


@pytest.mark.trap(7)
@pytest.mark.parametrize("style", ["LINEAR_ADD", "GATED_GATE"])
def test_gate_parameters_are_optimised_and_each_parameter_has_one_owner(
    style: str,
) -> None:
    training = make_training()
    for name, stage in {
        "r0c0": S.FOSSILIZED,
        "r1c0": S.HOLDING,
        "r0c1": S.BLENDING,
        "r1c1": S.TRAINING,
    }.items():
        plant(training, name, style=style, stage=stage)
    before = [
        p.detach().clone() for slot in training.sites for p in _seed(slot).parameters()
    ]
    train(training, 2)
    owned = [
        id(parameter)
        for group in (training.host_group, *training.seed_groups.values())
        for options in group.optimizer.param_groups
        for parameter in options["params"]
    ]
    modules = [training.host, *(_seed(slot) for slot in training.sites)]
    there = [
        id(p) for module in modules for p in module.parameters() if p.requires_grad
    ]
    assert sorted(owned) == sorted(there)
    assert len(set(owned)) == len(owned)
    after = [p.detach() for slot in training.sites for p in _seed(slot).parameters()]
    assert all(
        not torch.equal(old, new) for old, new in zip(before, after, strict=True)
    )


def _seed(slot: object) -> nn.Module:
    seed = getattr(slot, "seed")  # noqa: B009  known to be there
    assert isinstance(seed, nn.Module)
    return seed


def test_a_seed_whose_alpha_falls_is_frozen_and_learns_again_when_it_holds() -> None:
    with rig(horizon=12) as world:
        world.grow("r0c0", S.HOLDING)
        training = world.training()
        frozen = tensors_of(training, ("r0c0",))
        seed_only = [name for name in frozen if name.startswith("r0c0")]
        world.do("SET_ALPHA_TARGET", "r0c0", alpha_target=0.5, alpha_speed=3)
        world.step()  # the last epoch before alpha holds
        after = tensors_of(training, ("r0c0",))
        same_bits(
            {name: frozen[name] for name in seed_only},
            {name: after[name] for name in seed_only},
        )
        assert not torch.equal(frozen["host.parameter.0"], after["host.parameter.0"])
        assert world.slot("r0c0").alpha == 0.5
        world.step()
        assert not torch.equal(
            after["r0c0.parameter.0"],
            tensors_of(training, ("r0c0",))["r0c0.parameter.0"],
        )
