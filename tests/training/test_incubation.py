"""Seeds and the host's gradient: incubation leaves the host alone, blending never cuts it, and every seed is alive."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from esper.core.blueprints import BLUEPRINTS
from esper.core.ramps import STYLES
from esper.core.site import Site
from esper.core.stage import SeedStage
from esper.data.task import Task
from esper.training.step import prepare_epoch, train_step
from esper.training.validate import evaluate
from tests.core_helpers import (
    digits,
    make_training,
    plant,
    same_bits,
    tensors_of,
    tiny_config,
    train,
)
from tests.selection import slow_except
from tests.training.byte_images import byte_digits
from tests.training.test_foreign_hosts import grafted, of, training_of
from tests.training.test_micro_batching import images
from tests.training.test_precision import mlp_task, text_task
from tests.training.test_sources import task

S = SeedStage
SITES = ("r0c0", "r1c0", "r0c1", "r1c1")
BLUEPRINT_NAMES = BLUEPRINTS.names("cnn")


def seed_of(slot: Site) -> nn.Module:
    assert slot.seed is not None
    return slot.seed


STE: dict[str, Any] = {"env": {"incubation": "ste"}}
BF16: dict[str, Any] = {"task": {"precision": "bfloat16"}}
HOSTS: dict[str, tuple[Callable[[], Task], dict[str, Any]]] = {
    "cnn": (digits, {}),
    "cnn, straight through": (digits, STE),
    "fused cnn in bfloat16": (byte_digits, BF16),
    "transformer in bfloat16": (text_task, {**BF16, **STE}),
    "mlp in bfloat16, straight through": (mlp_task, {**BF16, **STE}),
    "grafted": (lambda: of(grafted()), {}),
    "grafted, dropout": (lambda: of(grafted(modules=0.5)), BF16),
    "grafted, global dropout": (lambda: of(grafted(functional=0.5)), {}),
    "dropout, in parts": (lambda: images(0.5), {"task": {"micro_batches": 4}}),
    "earlier sources": (task, {}),
    "earlier sources, straight through": (task, STE),
}


@pytest.mark.finding("L3")
@pytest.mark.finding("L4")
@pytest.mark.parametrize("name", HOSTS)
def test_incubating_seeds_change_no_bit_of_their_host(name: str) -> None:
    """Neither do their trials; and they learn."""
    make, sections = HOSTS[name]
    alone, growing = (training_of(make(), **sections) for _ in range(2))
    known = BLUEPRINTS.names(growing.host.topology, growing.host.sites)
    names = tuple(site.name for site in growing.sites)
    for number, slot in enumerate(names):
        plant(growing, slot, known[-1 - number % len(known)])
    born = tensors_of(growing, names)
    off = (0.0,) * len(names)
    trials = [tuple(float(slot == trial) for slot in names) for trial in names]
    for _ in range(2):
        train(alone)
        train(growing)
        tried = evaluate(growing, growing.task.validation, [off, *trials])
        plain = evaluate(alone, alone.task.validation, [off])
        assert torch.equal(tried.stats[0], plain.stats[0])
        same_bits(dict(alone.network_tensors(())), dict(growing.network_tensors(())))
        assert torch.equal(alone.totals.training, growing.totals.training)
    learned = tensors_of(growing, names)
    for slot in names:
        mine = [key for key in born if key.startswith(f"{slot}.parameter")]
        assert any(not torch.equal(born[key], learned[key]) for key in mine)


def test_running_statistics_of_a_blended_seed_see_each_batch_once() -> None:
    """A shadow pass runs through a later seed of a user's blueprint with BatchNorm, and leaves its buffers alone."""
    registry = BLUEPRINTS.copy()

    @registry.register("cnn", "normed", parameters=lambda channels: 2 * channels)
    def normed(channels: int) -> nn.Module:
        """BatchNorm."""
        return nn.BatchNorm2d(channels)

    alone, growing = make_training(), make_training()
    for training in (alone, growing):
        plant(training, "r1c0", "normed", stage=S.HOLDING, registry=registry)
    plant(growing, "r0c0")
    for _ in range(2):
        train(alone)
        train(growing)
        same_bits(tensors_of(alone, ("r1c0",)), tensors_of(growing, ("r1c0",)))
    assert (
        int(
            seed_of(growing.site_by_name["r1c0"]).get_buffer("body.num_batches_tracked")
        )
        > 0
    )


def test_an_incubating_seed_learns_what_it_will_be_used_for() -> None:
    """Its gradient is that of the host's loss on h + target · d(h), with respect to the seed alone."""
    training = make_training()
    slot = plant(training, "r0c0", target=0.7)
    before = {
        name: tensor.clone() for name, tensor in training.host.state_dict().items()
    }
    groups = prepare_epoch(training)
    x, y = digits().train.x[:32], digits().train.y[:32]
    seed = seed_of(slot)
    twin = digits().build_host().train()
    twin.load_state_dict(before)
    h = twin.segments[0](x).detach()
    grown = h + 0.7 * seed(h)
    for segment in list(twin.segments)[1:]:
        grown = segment(grown)
    expected = torch.autograd.grad(F.cross_entropy(grown, y), list(seed.parameters()))
    train_step(training, groups, x, y)
    for parameter, gradient in zip(seed.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.trap(1)
@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("style", STYLES)
def test_the_hosts_gradient_lives_at_alpha_one(site: str, style: str) -> None:
    training = make_training()
    plant(training, site, style=style, stage=S.HOLDING)
    train(training)
    for name, parameter in training.host.named_parameters():
        assert parameter.grad is not None
        assert float(parameter.grad.norm()) > 1e-6, name


@pytest.mark.trap(1)
def test_earlier_seeds_learn_through_later_ones() -> None:
    training = make_training()
    slots = [plant(training, site, stage=S.HOLDING) for site in SITES]
    train(training)
    for slot in slots:
        assert all(
            p.grad is not None and float(p.grad.norm()) > 1e-8
            for p in seed_of(slot).parameters()
        ), slot.name


@pytest.mark.trap(6)
@pytest.mark.parametrize("blueprint", BLUEPRINT_NAMES)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("draw", slow_except([0], range(3)))
def test_every_parameter_of_every_seed_is_alive_within_two_steps(
    draw: int, blueprint: str, style: str
) -> None:
    """Seeds are in every slot, incubating and blended, with several draws of their initial values."""
    for site in SITES:
        for stage in (S.TRAINING, S.HOLDING):
            training = make_training(
                tiny_config(task={"samples_per_epoch": 64, "batch_size": 32}), seed=draw
            )
            seed = seed_of(plant(training, site, blueprint, style, stage))
            alive = dict.fromkeys(dict(seed.named_parameters()), False)
            groups = prepare_epoch(training)
            assert {id(p) for p in seed.parameters()} == {
                id(p) for p in training.seed_groups[site].parameters
            }
            for batch in range(2):
                rows = slice(32 * batch, 32 * (batch + 1))
                train_step(
                    training, groups, digits().train.x[rows], digits().train.y[rows]
                )
                for name, parameter in seed.named_parameters():
                    assert parameter.grad is not None
                    assert bool(torch.isfinite(parameter.grad).all())
                    alive[name] |= float(parameter.grad.norm()) > 0
            assert all(alive.values()), (site, stage.name, draw, alive)
