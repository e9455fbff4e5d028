"""Images stored in memory as bytes: lookup, augmentation, and runs on them."""

from __future__ import annotations

from dataclasses import replace

import torch

from esper.data.task import Augmentation
from esper.training.execution.workers import WorkerExecutor
from esper.training.host_trainer import HostTrainer
from esper.training.host_training import HostTraining
from esper.training.metrics import make_metrics
from tests.core_helpers import plant, same_bits, tensors_of
from tests.data.byte_images import CPU, Rows
from tests.training.byte_images import byte_digits
from tests.training.test_foreign_hosts import training_of


def trained(
    task_values: dict[str, object], workers: int, batch: int = 32
) -> list[HostTraining]:
    task = byte_digits(**task_values)
    envs = [
        training_of(task, index=index, task={"batch_size": batch}) for index in range(3)
    ]
    with WorkerExecutor(workers) as pool:
        trainer = HostTrainer(task, envs, pool)
        for _ in range(2):
            trainer.epoch(envs)
    return envs


def test_augmented_hosts_are_the_same_for_any_number_of_workers_and_not_those_of_plain_images() -> (
    None
):
    augmented = {"augmentation": Augmentation(crop=1, flip=True)}
    one, three, plain = trained(augmented, 1), trained(augmented, 3), trained({}, 1)
    for a, b, c in zip(one, three, plain, strict=True):
        same_bits(tensors_of(a), tensors_of(b))
        assert not torch.equal(
            tensors_of(a)["host.parameter.0"], tensors_of(c)["host.parameter.0"]
        )


def test_streamed_images_train_the_hosts_that_bytes_in_memory_do() -> None:
    found = []
    for task in (byte_digits(), replace(byte_digits(), train=Rows(), workers=0)):
        config = training_of(byte_digits()).config
        env = HostTraining(0, task, config, make_metrics(1, CPU)[0])
        env.reset(0, 0)
        plant(env, "r0c0")
        with WorkerExecutor(1) as pool:
            trainer = HostTrainer(task, [env], pool)
            trainer.epoch([env])
            trainer.close()
        found.append(
            tensors_of(env, ("r0c0",)) | {"totals": env.totals.training.clone()}
        )
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], rtol=1e-4, atol=1e-6)


# Runs
