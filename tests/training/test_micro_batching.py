"""L4: a batch that is computed in parts gives the whole batch's step; only what is normalised by a batch differs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from esper.config import ConfigError
from esper.core.blueprints import BLUEPRINTS
from esper.core.ramps import STYLES
from esper.core.site import Place, Role
from esper.core.stage import SeedStage as S
from esper.data.objective import PAD
from esper.data.split import Split
from esper.data.task import Task
from esper.hosts.host import Host, SegmentedHost
from esper.training.host_training import HostTraining
from esper.training.step import prepare_epoch, train_step
from tests.core_helpers import (
    digits,
    make_training,
    plant,
    tensors_of,
    tiny_config,
    train,
)
from tests.training.test_foreign_hosts import language, texts, training_of

BATCH = 30
CONSTANT = {"schedule": "constant", "samples_per_epoch": BATCH, "batch_size": BATCH}


def host_without_batch_norm(dropout: float = 0.0) -> Host:
    first = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(1, 4),
        nn.ReLU(),
        nn.Dropout(dropout),
    )
    second = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
    return SegmentedHost(
        [first, second, head], [Place("r0c0", 4), Place("r0c1", 4)], "cnn"
    )


def images(dropout: float = 0.0) -> Task:
    return replace(digits(), build_host=lambda: host_without_batch_norm(dropout))


def close(
    first: dict[str, Tensor], second: dict[str, Tensor], relative: float = 1e-6
) -> None:
    """Weights of one owner together, and its momentum, in units of their norm: small ones are sums of large terms."""
    assert first.keys() == second.keys()
    kinds: dict[str, list[str]] = {}
    for name in first:
        kinds.setdefault(name.rstrip("0123456789"), []).append(name)
    for kind, names in kinds.items():
        a, b = (
            torch.cat([found[name].double().flatten() for name in names])
            for found in (first, second)
        )
        assert float((a - b).norm()) <= relative * float(b.norm()), kind


def all_of(training: HostTraining, seeds: tuple[str, ...]) -> dict[str, Tensor]:
    """Weights, momentum, totals and gradient statistics."""
    found = tensors_of(training, seeds)
    found["totals"] = training.totals.training[
        :3
    ].clone()  # how many calls there were is no result
    for name, summary in training.gradient_stats.summaries(
        training.gradient_stats.packed()
    ).items():
        found |= {
            f"statistics.{name}.{field}": torch.tensor(value)
            for field, value in vars(summary).items()
        }
    return found


def grown(
    task: Task, parts: int, incubation: str, stage: S = S.TRAINING
) -> HostTraining:
    training = training_of(
        task, task={**CONSTANT, "micro_batches": parts}, env={"incubation": incubation}
    )
    plant(training, "r0c0", stage=stage, target=0.7)
    plant(training, "r0c1", "bottleneck", "GATED_GATE", S.HOLDING)
    return training


@pytest.mark.finding("L4")
@pytest.mark.parametrize(
    ("parts", "incubation"), [(4, "shadow"), (7, "ste"), (BATCH, "shadow")]
)
def test_a_step_in_parts_is_the_step_of_the_whole_batch(
    parts: int, incubation: str
) -> None:
    whole, split = (grown(images(), count, incubation) for count in (1, parts))
    for training in (whole, split):
        train(training)
    close(all_of(split, ("r0c0", "r0c1")), all_of(whole, ("r0c0", "r0c1")))
    assert float(split.totals.training[3]) == parts


@pytest.mark.finding("L4")
@pytest.mark.parametrize("parts", [2, 5])
def test_parts_with_unequal_counts_of_tokens_weigh_what_they_hold(parts: int) -> None:
    """The text's first half is padded more than its second, so the mean of the parts' means would be another one."""
    split = texts()
    y = split.y.clone()
    y[: BATCH // 2, 1:] = PAD
    task = language(Split(split.x, y))
    found = []
    for count in (1, parts):
        training = training_of(task, task={**CONSTANT, "micro_batches": count})
        slot = training.site_by_name["r0c0"]
        training.plant(
            slot, BLUEPRINTS.get("transformer", "mlp_small"), STYLES["LINEAR_ADD"]
        )
        training.assign(slot, Role.INCUBATING, 0.0, 1.0, learning=True)
        groups = prepare_epoch(training)
        train_step(training, groups, task.train.x[:BATCH], y[:BATCH])  # type: ignore[union-attr]
        found.append(all_of(training, ("r0c0",)))
    close(found[1], found[0])
    assert found[0]["totals"][2] == int((y[:BATCH] != PAD).sum())


@pytest.mark.finding("L4")
def test_a_part_of_nothing_but_padding_weighs_nothing() -> None:
    """Such samples are refused in memory; one that streams in must not break a step that it has no part in."""
    task = language(texts(padding=False))
    x, y = task.train.x[:8], task.train.y[:8].clone()  # type: ignore[union-attr]
    y[2:4] = PAD
    found = []
    for count in (1, 4):
        training = training_of(task, task={**CONSTANT, "micro_batches": count})
        train_step(training, prepare_epoch(training), x, y)
        assert bool(torch.isfinite(training.host_group.parameters[0]).all())
        found.append(all_of(training, ()))
    close(found[1], found[0])


@pytest.mark.finding("L4")
def test_batch_norm_sees_the_parts() -> None:
    """Its statistics, in training and the running ones, are those of a part, as documented."""
    seen: dict[int, list[Tensor]] = {}
    for parts in (1, 2):
        training = make_training(tiny_config(task={**CONSTANT, "micro_batches": parts}))
        groups = prepare_epoch(training)
        layer = next(
            module
            for module in training.host.modules()
            if isinstance(module, nn.BatchNorm2d)
        )
        inputs = seen.setdefault(parts, [])
        layer.register_forward_pre_hook(
            lambda _layer, args, kept=inputs: kept.append(args[0].detach().clone())
        )  # type: ignore[misc]
        x, y = digits().train.x[:BATCH], digits().train.y[:BATCH]  # type: ignore[union-attr]
        train_step(training, groups, x, y)
        remembered = torch.zeros_like(layer.running_mean)  # type: ignore[arg-type]
        for part in inputs:
            remembered = 0.9 * remembered + 0.1 * part.mean(dim=(0, 2, 3))
        torch.testing.assert_close(layer.running_mean, remembered)
        assert layer.num_batches_tracked == parts == len(inputs)
    torch.testing.assert_close(torch.cat(seen[2]), seen[1][0])


def test_more_parts_than_samples_are_refused() -> None:
    words = "task.micro_batches is 33, more than the 32 samples of a batch"
    with pytest.raises(ConfigError, match=words):
        training_of(images(), task={"batch_size": 32, "micro_batches": 33})
    with pytest.raises(
        ConfigError, match=r"micro_batches.*greater than or equal to 1, not 0"
    ):
        tiny_config(task={"micro_batches": 0})
