"""A loss or a score that training and growth cannot use is refused before a run starts, with what would be right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import esper
from esper.data.host_checks import check_hosts
from esper.data.task import resolve

X = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
Y = X[:, :1] - X[:, 1:2]


def task(loss: Any = "mse", y: Tensor = Y, outputs: int = 1, score: Any = "r2", **fields: Any) -> esper.Task:
    def build() -> esper.hosts.graft.GraftedHost:
        return esper.graft(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, outputs)), {"r0c0": "0"}, "mlp")

    splits = [esper.Split(X[rows], y[rows]) for rows in (slice(0, 64), slice(64, 80), slice(80, 96))]
    return esper.Task("mine", None, build, *splits, batch_size=16, loss=loss, score=score, **fields)


def accepted(made: esper.Task) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        check_hosts(made)


def scaled(value: float) -> Any:
    return lambda o, y: value * (o - y).abs().mean(1)


def rising(o: Tensor, y: Tensor) -> Tensor:
    return (o - y).abs().mean() - (o - y).abs().mean(1)


REFUSED = {
    "a mean": (lambda o, y: F.mse_loss(o, y), r"shape \(\) .*tensor of shape \[3\] or \[3, ...\]; .*reduction='none'"),
    "not a tensor": (lambda o, y: 1.0, "returns float; it must return one value per sample"),
    "integers": (lambda o, y: (o > y).long()[:, 0], r"returns torch.int64; expected floating-point"),
    "an error": (
        lambda o, y: o @ y,
        r"the loss fails for outputs \(3, 1\) and targets torch.float32 \(3, 1\): Runtime",
    ),
    "other samples": (rising, "changes with the other samples of its batch"),
    "no gradient": (lambda o, y: (o - y).detach(), "the loss has no gradient"),
    "not finite": (lambda o, y: (o - y).abs() / 0, "the loss of an untrained host is not finite"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_loss_that_is_not_one_value_per_sample_is_refused(case: str) -> None:
    loss, words = REFUSED[case]
    with pytest.raises(esper.ConfigError, match=words):
        accepted(task(loss))


def test_shapes_that_would_be_broadcast_are_refused() -> None:
    """[n, 1] minus [n] is [n, n]: a finite number for each sample, and none of them its loss."""
    with pytest.raises(esper.ConfigError, match=r"Are shapes broadcast, such as \(n, 1\) with \(n,\)\?"):
        accepted(task(lambda o, y: (o - y) ** 2, Y[:, 0]))
    with pytest.raises(esper.ConfigError, match=r"outputs of shape \(3, 2\) for targets \(3, 1\); expected the same"):
        accepted(task("mse", outputs=2))


def test_a_score_is_checked_as_a_loss_but_may_count() -> None:
    accepted(task(score=lambda o, y: (o > 0) == (y > 0)))
    with pytest.raises(esper.ConfigError, match=r"the score returns shape \(\)"):
        accepted(task(score=lambda o, y: -F.mse_loss(o, y)))


def test_a_score_in_another_unit_is_refused_until_points_say_so() -> None:
    with pytest.raises(esper.ConfigError, match="set points so that scores span about 100 of them"):
        accepted(task(score=scaled(-1e4)))
    accepted(task(score=scaled(-1e4), points=0.01))
    with pytest.raises(esper.ConfigError, match="points is 0; it must be positive"):
        task(points=0)


def test_targets_of_any_shape_and_dtype_are_taken_with_a_loss_for_them() -> None:
    masks = torch.randint(0, 2, (96, 2, 3))

    def loss(o: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(o.view(y.shape), y.float(), reduction="none")

    accepted(task(loss, masks, 6, score=lambda o, y: (o.view(y.shape) > 0) == (y > 0)))
    accepted(task("bce", (Y > 0).byte(), score=None))


def test_targets_that_are_not_classes_need_a_loss_of_their_own() -> None:
    splits = [esper.Split(X[rows], Y[rows]) for rows in (slice(0, 64), slice(64, 80), slice(80, 96))]
    words = r"mine, train split: targets are torch.float32 of shape \(64, 1\); .*classes=None with a loss"
    with pytest.raises(esper.ConfigError, match=words):
        esper.Task("mine", 3, task().build_host, *splits)
    with pytest.raises(esper.ConfigError, match="mine: the loss cross_entropy needs classes"):
        esper.Task("mine", None, task().build_host, *splits)


def test_another_optimizer_needs_its_own_rate() -> None:
    config = esper.TrainingConfig.parse({"task": {"optimizer": "adamw"}})
    with pytest.raises(esper.ConfigError, match=r"rate of mine, 0\.05, is for sgd: set task.learning_rate, too"):
        resolve(config, task())
    resolved = resolve(config.with_values(task={"learning_rate": 0.003}), task())
    assert (resolved.task.optimizer, resolved.task.weight_decay, resolved.task.warmup_epochs) == ("adamw", 5e-4, 0.0)
    assert resolve(config, task(optimizer="adamw")).task.learning_rate == 0.05
    with pytest.raises(esper.ConfigError, match="must be below 1"):
        resolve(config.with_values(task={"beta2": 1.0}), task(optimizer="adamw"))
    with pytest.raises(esper.ConfigError, match=r"task.optimizer: .*'sgd' or 'adamw'"):
        resolve(esper.TrainingConfig(), task(optimizer="adam"))


def test_labels_are_smoothed_only_where_they_are_classes() -> None:
    config = esper.TrainingConfig.parse({"task": {"label_smoothing": 0.1}})
    with pytest.raises(esper.ConfigError, match=r"label_smoothing is 0\.1, but .* cross_entropy .*; mine needs 0"):
        resolve(config, task())
    assert resolve(config.with_values(task={"label_smoothing": 0.0}), task()).task.label_smoothing == 0
    with pytest.raises(esper.ConfigError, match=r"task\.label_smoothing"):
        esper.TrainingConfig.parse({"task": {"label_smoothing": 1.5}})


def test_targets_that_are_not_finite_are_refused() -> None:
    y = Y.clone()
    y[5] = float("nan")
    with pytest.raises(esper.ConfigError, match="mine, train split: sample 5: its targets are not finite"):
        task(y=y)
