"""Gradients of every kind are measured or left out, and kept aside and handed back."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from esper.config import ConfigError
from esper.grower.gradients import (
    BackwardWatch,
    GradStash,
    _joined,
    measurable,
    measure,
)
from esper.ops.grad_stats import grad_stats
from tests.grower.loops import Loop, X, Y, net, same, weights

CPU = torch.device("cpu")
DENSE = torch.tensor([[3.0, 0.0], [0.0, 4.0]])


class Own(Tensor):
    """A custom subclass, such as a DTensor."""


@pytest.mark.parametrize(
    "gradient",
    [
        DENSE,
        DENSE.to_sparse(),
        DENSE.to_sparse_csr(),
        torch.complex(torch.tensor([3.0]), torch.tensor([4.0])),
        DENSE.double(),
        DENSE.bfloat16(),
        DENSE.half(),
        DENSE.t(),
        torch.tensor([[5.0]]).expand(1, 1),
    ],
    ids=lambda g: f"{g.layout} {g.dtype}",
)
def test_the_norm_of_a_gradient_of_any_kind_is_measured(gradient: Tensor) -> None:
    stats = measure([[gradient], []], 1.0, 1e3, CPU)
    assert float(stats.norm[0]) == pytest.approx(5)
    assert float(stats.norm[1]) == 0


def test_doubled_rows_of_a_sparse_gradient_are_added_up_first() -> None:
    twice = torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.tensor([[3.0], [2.0]]), (3, 1)
    )
    assert float(measure([[twice]], 1.0, 1e3, CPU).norm[0]) == pytest.approx(5)


def test_a_kind_that_cannot_be_measured_is_left_out_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = torch.ones(2).as_subclass(Own)
    assert measurable(other) is None
    for _ in range(2):
        assert float(measure([[other, DENSE]], 1.0, 1e3, CPU).norm[0]) == pytest.approx(
            5
        )
    assert (
        len([record for record in caplog.records if "kind Own" in record.getMessage()])
        == 1
    )


def test_what_is_aside_is_summed_and_handed_back_at_a_scale() -> None:
    aside, parameter = GradStash(), nn.Parameter(torch.zeros(2))
    for value in (1.0, 2.0):
        parameter.grad = torch.full((2,), value)
        aside.take(parameter)
        assert parameter.grad is None
    assert aside
    aside.hand_back(torch.tensor(0.5))
    found: Any = parameter.grad
    assert found.tolist() == [1.5, 1.5]
    assert not aside
    aside.add(parameter, torch.ones(2))
    aside.drop([parameter])
    assert aside.get(parameter) is None


def test_statistics_of_several_devices_are_those_of_one() -> None:
    """The parts are as if on two devices, each of which has none of some owner's gradients."""
    draws = torch.Generator().manual_seed(0)
    first = [
        [torch.randn(3, 4, generator=draws), torch.zeros(2)],
        [torch.randn(5, generator=draws)],
        [],
    ]
    second = [[torch.full((2,), 1e6)], [], [torch.full((4,), 1e-9)]]
    whole = [one + other for one, other in zip(first, second, strict=True)]
    parts = torch.stack(
        [grad_stats(part, 1.0, 100.0).fields for part in (first, second)]
    )
    torch.testing.assert_close(
        _joined(parts, 1.0).fields, grad_stats(whole, 1.0, 100.0).fields
    )


def by_hand(loop: Loop, x: Tensor, y: Tensor) -> None:
    parameters = list(loop.model.parameters())
    gradients = torch.autograd.grad(
        nn.functional.cross_entropy(loop.model(x), y), parameters
    )
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    loop.optimizer.step()


def in_closure(loop: Loop, x: Tensor, y: Tensor) -> None:
    def closure() -> Tensor:
        loss = nn.functional.cross_entropy(loop.model(x), y)
        for parameter, gradient in zip(
            loop.model.parameters(),
            torch.autograd.grad(loss, list(loop.model.parameters())),
            strict=True,
        ):
            parameter.grad = gradient
        return loss

    loop.optimizer.step(closure)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [by_hand, in_closure])
def test_gradients_that_are_set_by_hand_are_refused_before_anything_is_trained(
    step: Any,
) -> None:
    """Seeds would get none, and nothing else would say why."""
    loop = Loop(step=step)
    before = [p.detach().clone() for p in loop.model.parameters()]
    with pytest.raises(
        ConfigError, match=r"gradients were set by hand.*loss\.backward\(\)"
    ):
        loop.train()
    assert all(
        torch.equal(p, old)
        for p, old in zip(loop.model.parameters(), before, strict=True)
    )


def changed_after(loop: Loop, x: Tensor, y: Tensor) -> None:
    loop.optimizer.zero_grad()
    nn.functional.cross_entropy(loop.model(x), y).backward()  # type: ignore[no-untyped-call]
    for parameter in loop.model.parameters():
        if parameter.grad is not None:
            parameter.grad = 0.5 * parameter.grad
    loop.optimizer.step()


def test_gradients_that_are_changed_after_a_backward_pass_are_taken() -> None:
    loop = Loop(step=changed_after).run()
    assert loop.grower.kept


def test_a_step_without_gradients_of_the_model_decides_nothing() -> None:
    model = net()
    watch = BackwardWatch(model)
    watch.check()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    with pytest.raises(ConfigError, match="by hand"):
        watch.check()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def polluted(loop: Loop, x: Tensor, y: Tensor, late: bool, clear: Any) -> None:
    """A step after another network's loss has left gradients, as that of a generator does in its discriminator."""
    (-10 * nn.functional.cross_entropy(loop.model(x), y)).backward()  # type: ignore[no-untyped-call]
    if not late:
        clear(loop)
    loss = nn.functional.cross_entropy(loop.model(x), y)
    if late:
        clear(loop)
    loss.backward()  # type: ignore[no-untyped-call]
    loop.optimizer.step()


def seeds_of(loop: Loop) -> dict[str, Tensor]:
    return weights(loop.grower.hooks.sites["r0c0"].seed)


@pytest.mark.parametrize("epochs", [3, 7])  # incubating, and blended in
@pytest.mark.parametrize(
    "clear",
    [
        lambda loop: loop.optimizer.zero_grad(),
        lambda loop: loop.model.zero_grad(),
        lambda loop: loop.optimizer.zero_grad(set_to_none=False),
    ],
)
def test_gradients_count_from_the_last_clearing_on_also_if_it_follows_the_pass(
    clear: Any, epochs: int
) -> None:
    loops = []
    for late in (False, True):
        step = partial(polluted, late=late, clear=clear)
        loops.append(Loop(step=step).run(epochs))
    first, second = loops
    assert same(weights(first.model), weights(second.model))
    assert same(seeds_of(first), seeds_of(second))


@pytest.mark.parametrize("epochs", [3, 7])
def test_gradients_of_several_passes_are_added_up(epochs: int) -> None:
    loop = Loop().run(epochs)
    seed = loop.grower.hooks.sites["r0c0"].seed
    parameter = next(p for p in seed.parameters() if p.requires_grad)
    arrived: list[Tensor] = []
    parameter.register_hook(lambda gradient: arrived.append(gradient.clone()))
    loop.model.train()
    for rows in torch.arange(64).split(16):
        nn.functional.cross_entropy(loop.model(X[rows]), Y[rows]).backward()  # type: ignore[no-untyped-call]
    assert len(arrived) == 4
    torch.testing.assert_close(
        loop.grower.groups.gradient(parameter), torch.stack(arrived).sum(0)
    )


def test_gradients_wait_for_a_step_through_passes_without_a_loss() -> None:
    stepped = []
    for extra in (False, True):

        def step(loop: Loop, x: Tensor, y: Tensor, extra: bool = extra) -> None:
            loop.optimizer.zero_grad()
            nn.functional.cross_entropy(loop.model(x), y).backward()  # type: ignore[no-untyped-call]
            if extra:
                loop.model.body[3].eval()
                loop.model(x)
                loop.model.train()
            loop.optimizer.step()

        stepped.append(seeds_of(Loop(step=step).run(3)))
    assert same(*stepped)


def test_zeros_that_make_the_state_of_an_optimizer_are_no_gradients_set_by_hand() -> (
    None
):
    """As torch.distributed.checkpoint does before it loads one."""
    other = net()
    optimizer = torch.optim.AdamW(other.parameters(), 0.01)
    loop = Loop(lambda p: torch.optim.AdamW(p, 0.01))
    before = weights(loop.model)
    state = get_optimizer_state_dict(other, optimizer)
    set_optimizer_state_dict(loop.model, loop.optimizer, state)
    assert same(weights(loop.model), before)
    assert loop.run().grower.kept


def test_a_distributed_checkpoint_of_growing_seeds_is_refused_with_what_works() -> None:
    loop = Loop(lambda p: torch.optim.AdamW(p, 0.01)).run(6)
    with pytest.raises(ConfigError, match=r"save optimizer\.state_dict\(\) and grower"):
        get_optimizer_state_dict(loop.model, loop.optimizer)
    assert len(loop.optimizer.state_dict()["param_groups"]) == 2
    network = loop.run().grower.finish()
    state = get_optimizer_state_dict(network, loop.optimizer)
    assert len(state["param_groups"]) == 2
