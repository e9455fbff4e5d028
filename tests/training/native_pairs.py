"""Two trainings of one host, by PyTorch and in compiled code, and all that an epoch of them writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from esper.data.split import Split
from esper.ops.grad_stats import FIELDS
from esper.training.host_training import HostTraining
from esper.training.native import NativePasses
from esper.training.step import train_epoch
from esper.training.validate import all_off, evaluate

CLOSE = 1e-5


def both(make: Callable[[], HostTraining]) -> tuple[HostTraining, HostTraining]:
    eager = make()
    native = make()
    native.native = NativePasses(native)
    return eager, native


def trained(
    make: Callable[[], HostTraining], epochs: int = 1
) -> tuple[HostTraining, HostTraining]:
    """Both, after some epochs."""
    eager, native = both(make)
    for _ in range(epochs):
        train_epoch(eager)
        train_epoch(native)
    return eager, native


def written(training: HostTraining) -> Iterator[tuple[str, Tensor]]:
    """All that an epoch writes, by name, in the training's own memory."""
    yield from training.network_tensors(tuple(training.seed_groups))
    for name, buffers in training.shadows.items():
        for number, tensor in enumerate(buffers.tensors()):
            yield f"shadow.{name}.{number}", tensor
    for site in training.sites:
        if site.planted is not None:
            yield f"{site.name}.finite", site.planted.finite
    yield "totals", training.totals.training
    yield "statistics", training.gradient_stats.total
    yield "rate", training.rate


def state_of(training: HostTraining) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in written(training)}


def take_over(training: HostTraining, other: HostTraining) -> None:
    """Copies what ``other`` has come to, so that the next step starts from there."""
    with torch.no_grad():
        for (name, tensor), (known, value) in zip(
            written(training), written(other), strict=True
        ):
            assert name == known
            tensor.copy_(value)


def check_alike(
    eager: HostTraining,
    native: HostTraining,
    tolerance: float = CLOSE,
    zeros: bool = True,
) -> None:
    """Without ``zeros``, rounding may decide whether an element of a gradient is 0, such as that of a key's bias."""
    assert native.native is not None
    assert native.native.reasons == {}
    expected = state_of(eager)
    found = state_of(native)
    assert expected.keys() == found.keys()
    if not zeros:
        _forget_zeros(expected, found)
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name],
            tensor,
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    assert (eager.epoch, eager.gradient_stats.batches) == (
        native.epoch,
        native.gradient_stats.batches,
    )


def _forget_zeros(*states: dict[str, Tensor]) -> None:
    for state in states:
        state["statistics"][:, FIELDS.index("zero")] = 0


def share_apart(
    eager: HostTraining, native: HostTraining, tolerance: float = CLOSE
) -> tuple[float, float]:
    """Share of the numbers that differ by more than ``tolerance``, relative to those above 1, and the most."""
    expected = state_of(eager)
    found = state_of(native)
    assert expected.keys() == found.keys()
    _forget_zeros(expected, found)
    parts = []
    for name, tensor in expected.items():
        size = tensor.double().abs().clamp(min=1)
        parts.append(((found[name].double() - tensor.double()).abs() / size).flatten())
    differences = torch.cat(parts)
    return float((differences > tolerance).double().mean()), float(differences.max())


def check_validation(
    eager: HostTraining, native: HostTraining, tolerance: float = 1e-4
) -> None:
    on = [site.seed is not None for site in eager.sites]
    configurations = [
        all_off(eager),
        tuple(0.7 if planted else 0.0 for planted in on),
        tuple(
            0.4 if planted and number % 2 else 0.0 for number, planted in enumerate(on)
        ),
    ]
    configurations = list(dict.fromkeys(configurations))
    expected = evaluate(eager, validation_of(eager), configurations)
    found = evaluate(native, validation_of(native), configurations)
    torch.testing.assert_close(
        found.stats, expected.stats, rtol=tolerance, atol=tolerance, equal_nan=True
    )
    apart = (found.correct.double() - expected.correct.double()).abs() > tolerance
    assert apart.double().mean() < 0.01  # a tie by rounding
    assert native.native is not None
    assert native.native.reasons == {}


def validation_of(training: HostTraining) -> Split:
    split = training.task.validation
    if training.alphas.dtype is torch.float64:
        return in_float64(split)
    return split


def in_float64(split: Split) -> Split:
    """The samples as networks see them; tokens are no numbers."""
    if split.x.dtype is torch.int64:
        return split
    y = split.y.double() if split.y.is_floating_point() else split.y
    return Split(split.inputs(0, len(split)).double(), y)


def doubled(training: HostTraining) -> HostTraining:
    """The host in float64, as no task has it; images in bytes as numbers, without augmentation."""
    for module in [training.host, *training.seeds()]:
        module.double()
    for name in ("alphas", "tried"):
        setattr(training, name, getattr(training, name).double())
    training.shadows.clear()
    training.pool.shadows.clear()
    for group in [training.host_group, *training.seed_groups.values()]:
        group.optimizer.state.clear()
        group.optimizer.zero_state()
    feed = training.feed
    assert feed is not None
    feed.split = in_float64(feed.split)
    if feed.x.is_floating_point():
        feed.x = feed.x.double()
    feed.y = feed.y.to(feed.split.y.dtype)
    return training
