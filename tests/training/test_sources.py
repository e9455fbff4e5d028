"""Sites that read earlier features than those to which they add: spans that overlap, nest, and reach from the inputs to
the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.core.place import Features, Place
from esper.core.stage import SeedStage as S
from esper.data.split import Split
from esper.data.task import Task, resolve
from esper.hosts.graft import GraftedHost, graft
from esper.hosts.host import Host, SegmentedHost, SiteSpan
from esper.training.host_training import HostTraining
from esper.training.metrics import make_metrics
from esper.training.step import add_gradients, prepare_epoch
from esper.training.validate import evaluate
from tests.core_helpers import digits, plant, tiny_config, train

WIDTH = 6
SPANS = {
    "r0c0": SiteSpan(1, 1),
    "r0c1": SiteSpan(0, 2),
    "r0c2": SiteSpan(1, 3),
    "r0c3": SiteSpan(2, 3),
    "r0c4": SiteSpan(0, 4),
}
SLOTS = tuple(SPANS)


class Chain(SegmentedHost):
    """Four layers of equal width, so that any blueprint fits between any two joints."""

    def __init__(self) -> None:
        layers = [
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())
            for _ in range(3)
        ]
        sites = [Place(name, WIDTH) for name in SLOTS]
        super().__init__(
            [*layers, nn.Linear(WIDTH, WIDTH)], sites, "mlp", list(SPANS.values())
        )


def as_a_graft() -> GraftedHost:
    """The same network as a user's module."""
    chain = Chain()
    model = nn.Sequential(*chain.segments)
    return graft(model, SITES, topology="mlp")


SITES = {
    "r0c0": "0",
    "r0c1": "0 -> 1",
    "r0c2": "1 -> 2",
    "r0c3": "2 -> 2",
    "r0c4": "0 -> 3",
}


@cache
def task() -> Task:
    x = torch.randn(80, WIDTH, generator=torch.Generator().manual_seed(0))
    split = Split(x, x.argmax(dim=1))
    return replace(
        digits(),
        classes=WIDTH,
        build_host=Chain,
        train=split,
        validation=split,
        test=split,
        batch_size=20,
    )


def made(build: Callable[[], Host] = Chain, **sections: dict[str, Any]) -> HostTraining:
    of_host = replace(task(), build_host=build)
    config = resolve(tiny_config(**sections), of_host)
    training = HostTraining(0, of_host, config, make_metrics(1, torch.device("cpu"))[0])
    training.reset(0, 0)
    return training


def by_hand(
    training: HostTraining,
    x: Tensor,
    alphas: Sequence[float],
    detached: int | None = None,
) -> Tensor:
    """Logits; the pass up to the site ``detached`` has no gradient."""
    joints = [x]
    for number, segment in enumerate(training.host.segments, 1):  # type: ignore[arg-type, var-annotated]
        h = segment(joints[-1])
        for site, (span, alpha) in enumerate(zip(SPANS.values(), alphas, strict=True)):
            seed = training.sites[site].seed
            if span.sink != number:
                continue
            if site == detached:
                h, joints = h.detach(), [joint.detach() for joint in joints]
            if seed is not None and alpha:
                source = h if span.source == number else joints[span.source]
                h = torch.add(h, seed(source), alpha=alpha)
        joints.append(h)
    return joints[-1]


def test_a_pass_gives_each_site_its_source() -> None:
    training = made()
    for name in SLOTS:
        plant(training, name, "mlp_small", stage=S.HOLDING)
    prepare_epoch(training)
    alphas, x = (1.0, 0.5, 0.25, 1.0, 0.75), task().validation.x
    kept: dict[int, Features] = {}

    def add(number: int, at: Features) -> Tensor:
        kept[number] = at.with_sink(
            torch.add(
                at.h, training.sites[number].seed(at.source), alpha=alphas[number]
            )
        )  # type: ignore[misc]
        return kept[number].h

    host = training.host.eval()
    with torch.no_grad():
        logits = host.forward_with_hook(x, add)
        assert torch.equal(logits, by_hand(training, x, alphas))
        for number, at in list(kept.items()):
            assert torch.equal(host.forward_from(x, number, at, add), logits), SLOTS[
                number
            ]


def test_sources_are_kept_for_as_long_as_a_site_reads_them_and_not_for_vacant_ones() -> (
    None
):
    kept: dict[str, tuple[int, ...]] = {}
    host = Chain().eval()

    def note(number: int, at: Features) -> Tensor:
        kept[SLOTS[number]] = tuple(at.earlier)
        return at.h

    host.forward_with_hook(task().validation.x, note)
    assert kept == {
        "r0c0": (0,),
        "r0c1": (0, 1),
        "r0c2": (0, 1, 2),
        "r0c3": (0, 1, 2),
        "r0c4": (0,),
    }
    kept.clear()
    host.forward_with_hook(task().validation.x, note, vacant=[0, 2, 3, 4])
    assert kept == {"r0c1": (0,)}


@pytest.mark.parametrize("trial", [None, "r0c1"])
def test_every_configuration_of_the_tree_is_that_configuration_run_by_itself(
    trial: str | None,
) -> None:
    training = made()
    for name in SLOTS:
        plant(
            training,
            name,
            "mlp_small",
            stage=S.TRAINING if name == trial else S.HOLDING,
        )
    train(training)
    configurations = list(
        product((0.0, 1.0), (1.0, 0.0), (0.0, 0.5), (0.5, 0.0, 1.0), (0.0, 1.0))
    )
    together = evaluate(training, task().validation, configurations)
    for number, configuration in enumerate(configurations):
        alone = evaluate(training, task().validation, [configuration])
        assert torch.equal(alone.stats[0], together.stats[number]), configuration
    assert len({float(loss) for loss in together.loss}) == len(configurations)


@pytest.mark.parametrize("name", SLOTS)
def test_shadow_gradients_are_those_of_a_network_written_out_by_hand(name: str) -> None:
    """The other seeds are blended in and learn with the host; the host's own gradients are those without the trial."""
    training, x, y = (
        made(env={"incubation": "shadow"}),
        task().validation.x[:20],
        task().validation.y[:20],
    )
    for other in SLOTS:
        plant(
            training,
            other,
            "mlp_small",
            stage=S.TRAINING if other == name else S.HOLDING,
            target=0.75,
        )
    groups = prepare_epoch(training)
    for group in groups:
        group.drop_gradients()
    number = SLOTS.index(name)
    seeds = [site.seed for site in training.sites if site.seed is not None]
    own = list(seeds[number].parameters())
    others = [
        p
        for module in (training.host, *seeds)
        for p in module.parameters()
        if p.requires_grad
    ]
    others = [p for p in others if not any(p is mine for mine in own)]
    absent = tuple(0.0 if slot == name else 0.75 for slot in SLOTS)
    loss = F.cross_entropy(
        by_hand(training, x, (0.75,) * len(SLOTS), detached=number), y
    )
    wanted = torch.autograd.grad(loss, own)
    of_others = torch.autograd.grad(
        F.cross_entropy(by_hand(training, x, absent), y), others
    )
    add_gradients(training, x, y, None)
    for parameter, gradient in zip((*own, *others), (*wanted, *of_others), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_a_grafted_network_gives_its_seeds_what_the_segments_of_a_host_give_theirs() -> (
    None
):
    """Planted, learning beside the host and on trial: the same numbers, and the same bits of the host."""
    results = []
    for build in (Chain, as_a_graft):
        training = made(build)
        for number, name in enumerate(SLOTS):
            plant(
                training,
                name,
                "mlp_small",
                stage=S.TRAINING if number == 2 else S.HOLDING,
                target=0.5,
            )
        train(training)
        train(training)
        found = evaluate(
            training, task().validation, list(product((0.0, 0.5), repeat=len(SLOTS)))
        )
        weights = [
            p.detach().clone()
            for group in (training.host_group, *training.seed_groups.values())
            for p in group.parameters
        ]
        results.append((found.stats, weights))
    (stats, weights), (others, other_weights) = results
    torch.testing.assert_close(stats, others, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(weights, other_weights, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
