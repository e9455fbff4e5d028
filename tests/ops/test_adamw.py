"""Esper's AdamW on the CPU: the steps of `torch.optim.AdamW`, with clipping and skipping read from memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.ops.adamw import AdamW
from esper.ops.optimizer import step_all
from tests.ops.test_sgd import assert_same, parameters, set_gradients

TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-2}


def reference(
    params: list[nn.Parameter], rate: float = 0.01, decay: float = 0.1, **options: Any
) -> torch.optim.AdamW:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in params if p.dim() > 1]},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=rate, weight_decay=decay, **{"fused": True, **options}
    )


def draw(
    mine: list[nn.Parameter], theirs: list[nn.Parameter], seed: int, factor: float = 1.0
) -> None:
    """The same gradients for both, but for ``factor``; torch's lie as their parameter, which its fused step needs."""
    set_gradients(mine, seed)
    for own, other in zip(mine, theirs, strict=True):
        other.grad = (
            None
            if own.grad is None
            else torch.empty_like(other).copy_(own.grad) * factor
        )


def values_of(
    optimizer: torch.optim.Optimizer, name: str | None = None
) -> list[Tensor]:
    """Copies of what is in the optimizer's state, of everything or under one name."""
    return [
        v.clone()
        for state in optimizer.state.values()
        for k, v in state.items()
        if name in (None, k)
    ]


def assert_same_state(own: AdamW, other: torch.optim.AdamW, tolerance: float) -> None:
    assert all(
        torch.equal(a, b)
        for a, b in zip(values_of(own, "step"), values_of(other, "step"), strict=True)
    )
    for name in ("exp_avg", "exp_avg_sq"):
        pairs = [
            [nn.Parameter(value) for value in values_of(each, name)]
            for each in (own, other)
        ]
        assert_same(pairs[0], pairs[1], tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)], ids=str)
def test_many_steps_equal_torch_with_decay_of_matrices_only(
    dtype: torch.dtype, betas: tuple[float, float]
) -> None:
    """One parameter is channels_last with gradients of other strides, and one is empty."""
    mine, theirs = parameters(dtype=dtype), parameters(dtype=dtype)
    rate = torch.zeros((), dtype=torch.float64)
    own, other = (
        AdamW(mine, rate, betas, weight_decay=0.1),
        reference(theirs, betas=betas),
    )
    for step in range(30):
        draw(mine, theirs, step)
        rate.fill_(0.01 / (1 + step % 4))
        for group in other.param_groups:
            group["lr"] = rate.item()
        own.step()
        other.step()
    assert_same(mine, theirs, TOLERANCES[dtype])
    assert_same_state(own, other, TOLERANCES[dtype])


def test_known_numbers() -> None:
    # m = 0.5 · 0 + 0.5 · 2 = 1 and v = 0.75 · 0 + 0.25 · 4 = 1, which divided by 1 − 0.5 and 1 − 0.75 are 2 and 4.
    # The matrix decays to 10 · (1 − 0.1 · 2) = 8, and moves by 0.1 · 2 / (√4 + 2) = 0.05.
    matrix, bias = (
        nn.Parameter(torch.full(shape, 10.0, dtype=torch.float64))
        for shape in ((1, 1), (1,))
    )
    optimizer = AdamW(
        [matrix, bias],
        torch.tensor(0.1, dtype=torch.float64),
        (0.5, 0.75),
        eps=2.0,
        weight_decay=2.0,
    )
    for parameter in (matrix, bias):
        parameter.grad = torch.full_like(parameter, 8.0)
    optimizer.step(clip_coef=torch.tensor(0.25))
    assert [p.item() for p in (matrix, bias)] == pytest.approx([7.95, 9.95], rel=1e-15)
    assert [value.item() for value in values_of(optimizer)] == [1, 1, 1] * 2
    assert matrix.grad is not None
    assert matrix.grad.item() == 8, "gradients are not overwritten"


def test_a_gradient_far_below_the_mean_keeps_its_digits() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = AdamW([p], torch.tensor(0.1), betas=(0.0, 0.9))
    for gradient in (1.0, 1e-9):
        p.grad = torch.full_like(p, gradient)
        optimizer.step()
        assert torch.equal(optimizer.state[p]["exp_avg"], p.grad)


def test_many_optimizers_in_one_call_have_their_own_rate_decay_and_coefficient() -> (
    None
):
    rates, decays = (0.01, 0.02, 0.05), (0.0, 0.1, 0.3)
    mine, theirs = ([parameters(seed) for seed in range(3)] for _ in range(2))
    own = [
        AdamW(p, torch.tensor(r), weight_decay=w)
        for p, r, w in zip(mine, rates, decays, strict=True)
    ]
    others = [reference(p, r, w) for p, r, w in zip(theirs, rates, decays, strict=True)]
    for step in range(6):
        # A column of a larger block, as grad_stats gives it.
        coef = torch.rand(
            3, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(step)
        )[:, 4]
        for index in range(3):
            draw(mine[index], theirs[index], step + index, factor=coef[index].item())
        step_all(own, coef)
        for other in others:
            other.step()
    for index in range(3):
        assert_same(mine[index], theirs[index])
        assert_same_state(own[index], others[index], 1e-6)


@pytest.mark.parametrize("fused", [True, False])
def test_state_goes_to_and_from_torch(fused: bool) -> None:
    mine, theirs = parameters(), parameters()
    own, other = (
        AdamW(mine, torch.tensor(0.01), weight_decay=0.1),
        reference(theirs, fused=fused),
    )
    for step in range(3):
        draw(mine, theirs, step)
        own.step()
        other.step()
    rate = torch.tensor(5.0)
    swapped = (
        AdamW(mine, rate, betas=(0.5, 0.5)),
        reference(theirs, 5.0, betas=(0.5, 0.5), fused=fused),
    )
    swapped[0].load_state_dict(other.state_dict())
    swapped[1].load_state_dict(own.state_dict())
    assert all(group["lr"] is rate for group in swapped[0].param_groups)
    assert rate.item() == pytest.approx(0.01)
    assert swapped[0].param_groups[0]["fused"] is True
    for step in range(3, 6):
        draw(mine, theirs, step)
        for each in swapped:
            each.step()
    assert_same(mine, theirs)
    assert_same_state(swapped[0], swapped[1], 1e-6)


def test_a_loaded_state_takes_the_layout_and_the_count_that_the_operator_needs() -> (
    None
):
    p = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    optimizer = AdamW([p], torch.tensor(0.1))
    moments = [torch.rand(4, 3, 2, 2) for _ in range(2)]
    saved = {
        "step": torch.tensor(7.0, dtype=torch.float64),
        "exp_avg": moments[0],
        "exp_avg_sq": moments[1],
    }
    groups = torch.optim.AdamW([{"params": [p]}, {"params": []}], lr=0.1).state_dict()[
        "param_groups"
    ]
    optimizer.load_state_dict({"state": {0: saved}, "param_groups": groups})
    for name, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
        assert torch.equal(optimizer.state[p][name], moment)
        assert optimizer.state[p][name].stride() == p.stride()
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert optimizer.state[p]["step"].item() == 8


def test_state_of_another_kind_of_adam_is_refused() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    saved = reference([weight], amsgrad=True).state_dict()
    with pytest.raises(
        ValueError, match=r"saved with amsgrad=True, and Esper's AdamW only does False"
    ):
        AdamW([weight], torch.tensor(0.1)).load_state_dict(saved)
    saved = torch.optim.AdamW(
        [{"params": [weight], "lr": 0.5}, {"params": []}], lr=0.25
    ).state_dict()
    rate = torch.tensor(0.1)
    with pytest.raises(
        ValueError,
        match=r"groups that share a learning rate were saved with \[0.5, 0.25\]",
    ):
        AdamW([weight], rate).load_state_dict(saved)
    assert rate == 0.1


def test_optimizers_that_cannot_be_stepped_together() -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    for p in params:
        p.grad = torch.ones(2)
    rate = torch.tensor(0.1)
    first = AdamW(params[:1], rate)
    for other in (
        AdamW(params[1:2], rate, betas=(0.5, 0.999)),
        AdamW(params[1:2], rate, eps=1e-6),
    ):
        with pytest.raises(
            ValueError, match=r"have one \(beta1, beta2, eps\), not \[\("
        ):
            step_all([first, other])
    more = AdamW(params[1:2], rate)
    more.add_param_group({"params": params[2:]})
    step_all([first, more])
    assert all(bool((p < 1).all()) for p in params)
    with pytest.raises(
        ValueError, match=r"clipped together have equally many groups, not \[2, 3\]"
    ):
        step_all([first, more], torch.ones(2))


def call(**changes: object) -> None:
    """The operator with right arguments, but for `changes`."""
    arguments: dict[str, object] = {
        "params": [torch.ones(3)],
        "grads": [torch.ones(3)],
        "exp_avgs": [torch.zeros(3)],
        "exp_avg_sqs": [torch.zeros(3)],
        "steps": [torch.zeros(())],
        "group_of": [0],
        "lr": [torch.tensor(0.1)],
        "weight_decay": [0.0],
        "coef": torch.ones(1),
        "grad_scale": None,
        "found_inf": None,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
    }
    torch.ops.esper.adamw_step_(*{**arguments, **changes}.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"exp_avgs": []},
            "there are 1 parameters, 1 gradients, 0 first moments, 1 second moments, 1 steps and 1 group numbers",
        ),
        ({"steps": []}, "there are 1 parameters, .* 0 steps and 1 group numbers"),
        (
            {"exp_avgs": [torch.ones(2)]},
            "first moment 0 differs from its parameter in shape, strides, dtype or device",
        ),
        (
            {"exp_avg_sqs": [torch.ones(6)[::2]]},
            "second moment 0 differs from its parameter in shape, strides",
        ),
        (
            {"steps": [torch.zeros((), dtype=torch.float64)]},
            "step 0 must be 1 float32 on the parameters' device",
        ),
        ({"steps": [torch.zeros(2)]}, "step 0 must be 1 float32"),
        ({"beta1": 1.0}, "betas must be at least 0 and below 1, got 1 and 0.999"),
        ({"beta1": -0.5}, "betas must be at least 0 and below 1, got -0.5 and 0.999"),
        ({"beta2": 1.0}, "betas must be at least 0 and below 1, got 0.9 and 1"),
        ({"beta2": -0.5}, "betas must be at least 0 and below 1, got 0.9 and -0.5"),
        ({"eps": -1.0}, "eps must not be negative, got -1"),
    ],
)
def test_wrong_arguments(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"^adamw_step_: .*{message}"):
        call(**changes)


def test_opcheck() -> None:
    params = [torch.randn(3, 4), torch.randn(5), torch.randn(0)]
    grads, means, squares = ([torch.rand_like(p) for p in params] for _ in range(3))
    steps = [torch.tensor(float(number)) for number in range(3)]
    rates = [torch.tensor(0.1), torch.tensor(0.2, dtype=torch.float64)]
    for coef in (None, torch.tensor([0.5, 1.0], dtype=torch.float64)):
        scale = None if coef is None else torch.tensor(2.0)
        state = (params, grads, means, squares, steps, [0, 1, 0])
        arguments = (*state, rates, [0.0, 0.1], coef, scale, None, 0.9, 0.99, 1e-8)
        torch.library.opcheck(torch.ops.esper.adamw_step_.default, arguments)
