"""The operators of Esper's optimizers: what they refuse, and gradients of any layout."""

from __future__ import annotations

import pytest
import torch


def sgd_arguments(**changes: object) -> dict[str, object]:
    """Right arguments of the operator, but for ``changes``."""
    return {
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
        **changes,
    }


def adamw_arguments(**changes: object) -> dict[str, object]:
    same = sgd_arguments()
    for name in ("momenta", "momentum", "nesterov"):
        del same[name]
    params, grads = same.pop("params"), same.pop("grads")
    return {
        "params": params,
        "grads": grads,
        "exp_avgs": [torch.zeros(3)],
        "exp_avg_sqs": [torch.zeros(3)],
        "steps": [torch.zeros(())],
        **same,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        **changes,
    }


WRONG_SGD: list[tuple[dict[str, object], str]] = [
    ({"params": [torch.ones(3, dtype=torch.int64)]}, "0 must be float32, bfloat16 or"),
    ({"params": [torch.ones(6)[::2]]}, "parameter 0 has holes or repeats"),
    ({"grads": []}, "are 1 parameters, 0 gradients, 1 group numbers and 1 momenta"),
    ({"grads": [torch.ones(4)]}, "gradient 0 differs from its parameter in shape"),
    ({"grads": [torch.ones(3).double()]}, "gradient 0 differs from its parameter"),
    ({"momenta": [torch.ones(2)]}, "momentum 0 differs from its parameter"),
    ({"momenta": []}, r"0 momenta \(as many with momentum, none without\)"),
    ({"momentum": -0.5}, "momentum must not be negative, got -0.5"),
    ({"momentum": 0.0, "momenta": [], "nesterov": True}, "nesterov needs momentum"),
    ({"group_of": [1]}, r"group_of\[0\] is 1, and there are 1 groups"),
    ({"weight_decay": [0.0, 0.1]}, "there are 1 learning rates but 2 weight decays"),
    ({"lr": [torch.tensor([0.1, 0.2])]}, "lr must be 1 float32 or float64 on the"),
    ({"lr": [torch.tensor(1)]}, "lr must be 1 float32 or float64"),
    ({"coef": torch.ones(2)}, "coef must be 1 float32 or float64"),
    ({"coef": torch.ones(1, 1)}, "coef must have one dimension, and has 2"),
    ({"grad_scale": torch.ones(2)}, "grad_scale must be 1 float32 or float64"),
    ({"found_inf": torch.ones(2)}, "found_inf must be 1 float32 or float64"),
]
WRONG_ADAMW: list[tuple[dict[str, object], str]] = [
    ({"exp_avgs": []}, "are 1 parameters, 1 gradients, 0 first moments, 1 second"),
    ({"steps": []}, "there are 1 parameters, .* 0 steps and 1 group numbers"),
    ({"exp_avgs": [torch.ones(2)]}, "first moment 0 differs from its parameter in"),
    ({"exp_avg_sqs": [torch.ones(6)[::2]]}, "second moment 0 differs from its"),
    ({"steps": [torch.zeros(()).double()]}, "step 0 must be 1 float32 on the"),
    ({"steps": [torch.zeros(2)]}, "step 0 must be 1 float32"),
    ({"beta1": 1.0}, "betas must be at least 0 and below 1, got 1 and 0.999"),
    ({"beta2": -0.5}, "betas must be at least 0 and below 1, got 0.9 and -0.5"),
    ({"eps": -1.0}, "eps must not be negative, got -1"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_SGD)
def test_wrong_arguments_of_sgd(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"^sgd_step_: .*{message}"):
        torch.ops.esper.sgd_step_(*sgd_arguments(**changes).values())


@pytest.mark.parametrize(("changes", "message"), WRONG_ADAMW)
def test_wrong_arguments_of_adamw(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"^adamw_step_: .*{message}"):
        torch.ops.esper.adamw_step_(*adamw_arguments(**changes).values())


def test_gradients_of_any_layout() -> None:
    weight, gradient = torch.randn(4, 3, 2, 2), torch.randn(4, 3, 2, 2)
    for layout in (
        gradient,
        gradient.to(memory_format=torch.channels_last),
        gradient[:, :1].expand(4, 3, 2, 2),
    ):
        p = weight.to(memory_format=torch.channels_last, copy=True)
        alone = sgd_arguments(params=[p], grads=[layout], momenta=[], momentum=0.0)
        torch.ops.esper.sgd_step_(*alone.values())
        torch.testing.assert_close(p, weight - 0.1 * layout)
