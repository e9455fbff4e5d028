"""The objective of hosts: a loss that steps minimise and a score that is to rise, both per sample."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from esper.config import ConfigError
from esper.ops.accumulators import Accumulators, accumulate_
from esper.ops.cross_entropy import cross_entropy, cross_entropy_into

PerSample = Callable[[Tensor, Tensor], Tensor]
"""Maps outputs [N, ...] of a network and targets [N, ...] to one value per sample, [N], or to [N, ...], of which the
mean over all dimensions but the first counts."""

PAD = -100
"""Target that is ignored, such as padding after the end of a text."""


class ClassObjective:
    """Cross-entropy and accuracy in one pass over the logits, [N, C] for targets [N], or [N, T, C] for [N, T]."""

    smooths = True
    """Whether training may smooth labels."""

    def __init__(self, language: bool) -> None:
        self.dtype = torch.int16 if language else torch.uint8
        """Dtype of the score of each sample in accumulators."""

    def measure(
        self,
        outputs: Tensor,
        y: Tensor,
        label_smoothing: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Returns the mean loss [], differentiable, and sums for ``accumulate_``, float64 [5]."""
        result = cross_entropy(outputs, y, ignore_index=PAD, label_smoothing=label_smoothing)
        return result.loss, result.stats

    def measure_into(
        self,
        outputs: Tensor,
        y: Tensor,
        accumulators: Accumulators,
        env: int,
        configuration: int,
        first: int,
    ) -> None:
        """Adds the sums, and writes the scores of the samples from ``first`` on, into a row of ``accumulators``."""
        cross_entropy_into(outputs, y, accumulators, env, configuration, first, ignore_index=PAD)

    def weight(self, y: Tensor) -> Tensor:
        """Returns the number of targets over which a mean loss is taken, a scalar on the device of ``y``."""
        return (y != PAD).sum()

    def counts(self, y: Tensor) -> NDArray[np.float64]:
        """Returns the number of targets that make up the score of each sample, float64 [N]."""
        if y.dim() == 1:
            return np.ones(len(y))
        return np.asarray((y != PAD).sum(dim=1).double().cpu())


class SampleObjective:
    """A loss and a score as functions of outputs and targets, with the methods of :class:`ClassObjective`.

    They see outputs in float32 or wider, outside autocast. Labels cannot be smoothed.
    """

    dtype = torch.float32
    smooths = False

    def __init__(self, loss: PerSample, score: PerSample) -> None:
        self.loss = loss
        self.score = score

    def measure(
        self,
        outputs: Tensor,
        y: Tensor,
        label_smoothing: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        losses, scores = self.of_samples(outputs, y)
        return losses.mean(), _sums(losses, scores)

    def measure_into(
        self,
        outputs: Tensor,
        y: Tensor,
        accumulators: Accumulators,
        env: int,
        configuration: int,
        first: int,
    ) -> None:
        losses, scores = self.of_samples(outputs, y)
        accumulate_(accumulators, env, _sums(losses, scores), configuration)
        accumulators.correct[env, configuration, first : first + len(scores)] = scores

    def of_samples(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the loss of each sample [N], differentiable, and its score [N]."""
        with torch.autocast(outputs.device.type, enabled=False):
            outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
            losses = self.loss(outputs, y)
            with torch.no_grad():
                scores = self.score(outputs.detach(), y)
            return _of_samples(losses), _of_samples(scores)

    def weight(self, y: Tensor) -> Tensor:
        return torch.full((), len(y), device=y.device)

    def counts(self, y: Tensor) -> NDArray[np.float64]:
        return np.ones(len(y))


Objective = ClassObjective | SampleObjective
"""The loss and the score of a task, as the passes of a host use them."""


def _of_samples(values: Tensor) -> Tensor:
    """Returns the means [N] over all dimensions but the first, in float32 or wider."""
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    if values.dim() <= 1:
        return values
    return values.flatten(1).mean(dim=1)


def _sums(losses: Tensor, scores: Tensor) -> Tensor:
    """Returns sums for accumulators, float64 [5], without waiting for a GPU."""
    losses = losses.detach().double()
    count = torch.full_like(losses.sum(), len(losses))
    bad = (~losses.isfinite()).sum().double()
    # In the order of ACCUMULATOR_FIELDS.
    sums = [
        losses.sum(),
        scores.double().sum(),
        count,
        torch.ones_like(count),
        bad,
    ]
    return torch.stack(sums)


def class_losses(outputs: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of logits [N, C] or [N, T, C] with int64 targets [N] or [N, T]; of tokens, the mean that counts."""
    losses = F.cross_entropy(
        outputs.flatten(0, -2),
        y.flatten(),
        reduction="none",
        ignore_index=PAD,
    ).view(y.shape)
    if y.dim() == 1:
        return losses
    # Padding has no loss, and does not count.
    return losses.sum(dim=1) / (y != PAD).sum(dim=1)


def class_accuracy(outputs: Tensor, y: Tensor) -> Tensor:
    """Share of the targets with the largest logit, for shapes as of :func:`class_losses`."""
    right = (outputs.argmax(dim=-1) == y).float()
    if y.dim() == 1:
        return right
    return right.sum(dim=1) / (y != PAD).sum(dim=1)


def squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    """(output − target)², in the shape of the targets."""
    return (_alike(outputs, y) - y) ** 2


def binary_losses(outputs: Tensor, y: Tensor) -> Tensor:
    """Binary cross-entropy of logits with targets from 0 to 1, in the shape of the targets."""
    outputs = _alike(outputs, y)
    return F.binary_cross_entropy_with_logits(outputs, y.to(outputs.dtype), reduction="none")


def label_accuracy(outputs: Tensor, y: Tensor) -> Tensor:
    """1 for each label whose logit has the right sign, else 0, in the shape of the targets."""
    outputs = _alike(outputs, y)
    return ((outputs > 0) == (y > 0.5)).float()


class Explained:
    """The score R² = 1 − (output − target)² / variance, by ``variance`` [...] of the targets [N, ...] over samples.

    Its mean over samples is the coefficient of determination, averaged over outputs: 1 is perfect, and 0 is always
    predicting the mean.
    """

    def __init__(self, variance: Tensor) -> None:
        self.variance = variance

    @classmethod
    def of(cls, y: Tensor) -> Explained:
        """Makes the score for targets ``y`` [N, ...]. Raises ConfigError if a target does not vary."""
        variance = y.to(torch.promote_types(y.dtype, torch.float32)).var(dim=0, unbiased=False)
        if not bool((variance > 0).all()):
            raise ConfigError(
                "the score r2 divides by the variance of the validation targets, and one of them is constant"
            )
        return cls(variance)

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        return 1 - squared_error(outputs, y) / self.variance


def _alike(outputs: Tensor, y: Tensor) -> Tensor:
    """Returns the outputs in the shape of the targets; [N, 1] stands for [N].

    Raises ValueError for other shapes, which would be broadcast.
    """
    if outputs.shape == (*y.shape, 1):
        outputs = outputs.squeeze(-1)
    if outputs.shape != y.shape:
        raise ValueError(f"outputs of shape {tuple(outputs.shape)} for targets {tuple(y.shape)}; expected the same")
    return outputs


LOSSES: dict[str, PerSample] = {
    "cross_entropy": class_losses,
    "mse": squared_error,
    "bce": binary_losses,
}
SCORES = ("accuracy", "r2")


def make_objective(
    loss: str | PerSample,
    score: str | PerSample | None,
    classes: int | None,
    validation: Tensor,
) -> Objective:
    """Makes the objective of a task from the fields of the same names, and its validation targets [N, ...].

    Raises ConfigError, listing what would be right.
    """
    if isinstance(loss, str) and loss not in LOSSES:
        raise ConfigError(f"unknown loss {loss!r}; known: {', '.join(LOSSES)}, or a function of outputs and targets")
    if isinstance(score, str) and score not in SCORES:
        raise ConfigError(f"unknown score {score!r}; known: {', '.join(SCORES)}, or a function of outputs and targets")
    if loss == "cross_entropy" and classes is None:
        raise ConfigError("the loss cross_entropy needs classes, their number")
    if score is None and isinstance(loss, str):
        score = "r2" if loss == "mse" else "accuracy"
    if score is None:
        raise ConfigError(
            f"a custom loss needs a score: one of {', '.join(SCORES)}, or a function of outputs and targets that "
            "returns one value per sample, higher is better"
        )
    if (loss, score) == ("cross_entropy", "accuracy"):
        return ClassObjective(language=validation.dim() == 2)
    if score == "accuracy":
        score = label_accuracy if classes is None else class_accuracy
    elif score == "r2":
        score = Explained.of(validation)
    if isinstance(loss, str):
        loss = LOSSES[loss]
    assert not isinstance(score, str)
    return SampleObjective(loss, score)
