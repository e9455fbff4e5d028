"""Esper's SGD on the CPU: the steps of `torch.optim.SGD`, with clipping and skipping read from memory."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.ops.optimizer import step_all
from esper.ops.sgd import SGD

OPTIONS: list[dict[str, Any]] = [
    {"lr": 0.1},
    {"lr": 0.05, "weight_decay": 0.01},
    {"lr": 0.05, "momentum": 0.9},
    {"lr": 0.03, "momentum": 0.9, "weight_decay": 5e-4},
    {"lr": 0.02, "momentum": 0.8, "weight_decay": 5e-4, "nesterov": True},
]
SHAPES = ((1,), (7,), (16, 3, 3, 3), (33, 65), (), (0, 4), (1000,))


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    made = [
        nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for shape in SHAPES
    ]
    made[2].data = made[2].data.to(memory_format=torch.channels_last)
    return made


def set_gradients(params: list[nn.Parameter], seed: int) -> None:
    """The same gradients for the same seed; one is None now and then."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for i, parameter in enumerate(params):
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = None if (seed + i) % 5 == 0 else gradient.contiguous()


def assert_same(
    a: list[nn.Parameter], b: list[nn.Parameter], tolerance: float = 1e-6
) -> None:
    """Relative to the size of each tensor: single elements near zero have lost more, in both."""
    for mine, theirs in zip(a, b, strict=True):
        assert (mine - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_many_steps_equal_torch(options: dict[str, Any]) -> None:
    mine, theirs = parameters(), parameters()
    own, reference = SGD(mine, **options), torch.optim.SGD(theirs, **options)
    for step in range(100):
        set_gradients(mine, step)
        set_gradients(theirs, step)
        own.step()
        reference.step()
    assert_same(mine, theirs)


def test_float64_and_bfloat16() -> None:
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.bfloat16, 1e-2)):
        mine, theirs = parameters(dtype=dtype), parameters(dtype=dtype)
        own = SGD(mine, lr=0.01, momentum=0.9, weight_decay=0.01)
        reference = torch.optim.SGD(theirs, lr=0.01, momentum=0.9, weight_decay=0.01)
        for step in range(10):
            set_gradients(mine, step)
            set_gradients(theirs, step)
            own.step()
            reference.step()
        assert_same(mine, theirs, tolerance)


def test_known_numbers() -> None:
    # g = 2 * 0.5 + 0.1 * 10 = 2; momentum 0 -> 2 -> 0.5 * 2 + 2 = 3 (the second g: 2 * 0.5 + 0.1 * 10 with p held).
    p = nn.Parameter(torch.tensor([10.0]))
    optimizer = SGD([p], lr=1.0, momentum=0.5, weight_decay=0.1)
    p.grad = torch.tensor([2.0])
    optimizer.step(clip_coef=torch.tensor([0.5]))
    assert p.item() == 8
    assert optimizer.state[p]["momentum_buffer"].item() == 2
    optimizer.step(clip_coef=torch.tensor([0.5]))  # g = 1 + 0.8 = 1.8, momentum 1 + 1.8
    assert p.item() == pytest.approx(8 - 2.8)


def test_groups_have_their_own_rate_decay_and_coefficient() -> None:
    mine, theirs = parameters(), parameters()
    options = [{"lr": 0.1, "weight_decay": 0.0}, {"lr": 0.01, "weight_decay": 0.1}]
    own = SGD(
        [{"params": mine[:3], **options[0]}, {"params": mine[3:], **options[1]}],
        momentum=0.9,
    )
    reference = torch.optim.SGD(
        [{"params": theirs[:3], **options[0]}, {"params": theirs[3:], **options[1]}],
        momentum=0.9,
    )
    coef = torch.tensor([0.5, 0.25], dtype=torch.float64)
    for step in range(10):
        set_gradients(mine, step)
        set_gradients(theirs, step)
        for i, parameter in enumerate(theirs):
            if parameter.grad is not None:
                parameter.grad *= coef[0 if i < 3 else 1].item()
        own.step(clip_coef=coef)
        reference.step()
    assert_same(mine, theirs)


SCHEDULERS: list[
    Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
] = [
    lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6]),
    lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda epoch: 1 / (1 + epoch)
    ),
    lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.3, total_steps=12
    ),
]


@pytest.mark.parametrize("scheduler", range(len(SCHEDULERS)))
def test_schedulers_fill_the_rate(scheduler: int) -> None:
    mine, theirs = parameters(), parameters()
    own = SGD(mine, lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(theirs, lr=0.1, momentum=0.9)
    rate = own.param_groups[0]["lr"]
    schedules = [SCHEDULERS[scheduler](own), SCHEDULERS[scheduler](reference)]
    for step in range(10):
        set_gradients(mine, step)
        set_gradients(theirs, step)
        own.step()
        reference.step()
        for schedule in schedules:
            schedule.step()
        assert own.param_groups[0]["lr"] is rate
        assert rate.item() == pytest.approx(
            reference.param_groups[0]["lr"], rel=1e-9, abs=1e-12
        )
    assert_same(mine, theirs)


def test_a_tensor_as_the_rate_is_used_and_not_shared() -> None:
    rate = torch.tensor(0.5)
    groups = [{"params": [nn.Parameter(torch.ones(2))]} for _ in range(2)]
    optimizer = SGD(groups, lr=rate)
    assert optimizer.param_groups[0]["lr"] is rate
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    schedule.step()
    assert [group["lr"].item() for group in optimizer.param_groups] == [0.25, 0.25]


def test_state_goes_to_and_from_torch() -> None:
    mine, theirs = parameters(), parameters()
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    own, reference = SGD(mine, **options), torch.optim.SGD(theirs, **options)
    for step in range(3):
        set_gradients(mine, step)
        set_gradients(theirs, step)
        own.step()
        reference.step()
    assert isinstance(own.state_dict()["param_groups"][0]["lr"], float)
    swapped = SGD(mine, lr=5.0, momentum=0.1), torch.optim.SGD(theirs, lr=5.0)
    rate = swapped[0].param_groups[0]["lr"]
    swapped[0].load_state_dict(reference.state_dict())
    swapped[1].load_state_dict(own.state_dict())
    assert swapped[0].param_groups[0]["lr"] is rate
    assert rate.item() == 0.1
    for step in range(3, 6):
        set_gradients(mine, step)
        set_gradients(theirs, step)
        swapped[0].step()
        swapped[1].step()
    assert_same(mine, theirs)


def test_state_of_another_kind_of_sgd_is_refused() -> None:
    p = nn.Parameter(torch.ones(2))
    saved = torch.optim.SGD([p], lr=0.1, momentum=0.9, dampening=0.5).state_dict()
    with pytest.raises(
        ValueError, match=r"saved with dampening=0.5, and Esper's SGD only does 0"
    ):
        SGD([p], lr=0.1).load_state_dict(saved)


def test_wrong_options() -> None:
    p = nn.Parameter(torch.ones(2))
    for options, message in (
        ({"lr": -1.0}, "lr must not be negative, got -1"),
        ({"momentum": -0.1}, "momentum must not be negative"),
        ({"weight_decay": math.nan}, "weight_decay must not be negative, got nan"),
        ({"nesterov": True}, "nesterov needs momentum"),
    ):
        with pytest.raises(ValueError, match=message):
            SGD([p], **options)  # type: ignore[arg-type]
    p.grad = torch.ones(2)
    other = nn.Parameter(torch.ones(2))
    with pytest.raises(
        ValueError,
        match=r"have one \(momentum, nesterov\), not \[\(0.0, False\), \(0.9, False\)\]",
    ):
        step_all([SGD([p], momentum=0.9), SGD([other])])


def call(**changes: object) -> None:
    """The operator with right arguments, but for `changes`."""
    arguments: dict[str, object] = {
        "params": [torch.ones(3)],
        "grads": [torch.ones(3)],
        "momenta": [torch.zeros(3)],
        "group_of": [0],
        "lr": [torch.tensor(0.1)],
        "weight_decay": [0.0],
        "coef": torch.ones(1),
        "grad_scale": None,
        "found_inf": None,
        "momentum": 0.9,
        "nesterov": False,
    }
    torch.ops.esper.sgd_step_(*{**arguments, **changes}.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"params": [torch.ones(3, dtype=torch.int64)]},
            "parameter 0 must be float32, bfloat16 or float64",
        ),
        ({"params": [torch.ones(6)[::2]]}, "parameter 0 has holes or repeats"),
        (
            {"grads": []},
            "there are 1 parameters, 0 gradients, 1 group numbers and 1 momenta",
        ),
        (
            {"grads": [torch.ones(4)]},
            "gradient 0 differs from its parameter in shape, dtype or device",
        ),
        (
            {"grads": [torch.ones(3).double()]},
            "gradient 0 differs from its parameter in shape, dtype or device",
        ),
        ({"momenta": [torch.ones(2)]}, "momentum 0 differs from its parameter"),
        (
            {"momenta": [], "momentum": 0.9},
            r"0 momenta \(as many with momentum, none without\)",
        ),
        ({"momentum": -0.5}, "momentum must not be negative, got -0.5"),
        ({"momentum": 0.0, "momenta": [], "nesterov": True}, "nesterov needs momentum"),
        ({"group_of": [1]}, r"group_of\[0\] is 1, and there are 1 groups"),
        (
            {"weight_decay": [0.0, 0.1]},
            "there are 1 learning rates but 2 weight decays",
        ),
        (
            {"lr": [torch.tensor([0.1, 0.2])]},
            "lr must be 1 float32 or float64 on the parameters' device",
        ),
        ({"lr": [torch.tensor(1)]}, "lr must be 1 float32 or float64"),
        ({"coef": torch.ones(2)}, "coef must be 1 float32 or float64"),
        ({"coef": torch.ones(1, 1)}, "coef must have one dimension, and has 2"),
        ({"grad_scale": torch.ones(2)}, "grad_scale must be 1 float32 or float64"),
        ({"found_inf": torch.ones(2)}, "found_inf must be 1 float32 or float64"),
    ],
)
def test_wrong_arguments(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"^sgd_step_: .*{message}"):
        call(**changes)


def test_gradients_of_any_layout() -> None:
    weight = torch.randn(4, 3, 2, 2)
    gradient = torch.randn(4, 3, 2, 2)
    p = nn.Parameter(weight.to(memory_format=torch.channels_last, copy=True))
    for layout in (
        gradient,
        gradient.to(memory_format=torch.channels_last),
        gradient[:, :1].expand(4, 3, 2, 2),
    ):
        with torch.no_grad():
            p.copy_(weight)
        p.grad = None
        grads: list[Tensor] = [layout]
        torch.ops.esper.sgd_step_(
            [p.data],
            grads,
            [],
            [0],
            [torch.tensor(0.5)],
            [0.0],
            None,
            None,
            None,
            0.0,
            False,
        )
        torch.testing.assert_close(p.data, weight - 0.5 * layout)


def test_opcheck() -> None:
    params = [torch.randn(3, 4), torch.randn(5), torch.randn(0)]
    grads = [torch.randn_like(p) for p in params]
    momenta = [torch.zeros_like(p) for p in params]
    rates = [torch.tensor(0.1), torch.tensor(0.2, dtype=torch.float64)]
    coef = torch.tensor([0.5, 1.0], dtype=torch.float64)
    for scale in (None, torch.tensor(2.0)):
        arguments = (
            params,
            grads,
            momenta,
            [0, 1, 0],
            rates,
            [0.0, 0.1],
            coef,
            scale,
            None,
            0.9,
            True,
        )
        torch.library.opcheck(torch.ops.esper.sgd_step_.default, arguments)
    arguments = (
        params,
        grads,
        [],
        [0, 1, 0],
        rates,
        [0.0, 0.1],
        None,
        None,
        None,
        0.0,
        False,
    )
    torch.library.opcheck(torch.ops.esper.sgd_step_.default, arguments)
