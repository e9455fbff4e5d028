"""The operators that training and validating a host call, by device: Esper's own, and torch's for the same jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from esper.config import TrainingConfig
from esper.core.stage import SeedStage
from esper.data.task import Augmentation, resolve
from esper.ops.norm_relu_pool import NormReluPool
from esper.training.host_training import HostTraining
from esper.training.metrics import make_metrics
from tests.core_helpers import plant
from tests.training.byte_images import byte_digits

KERNELS = {
    "stage_images",
    "norm_relu_pool_forward",
    "norm_relu_pool_backward",
    "norm_relu_pool_update_",
    "cross_entropy_forward",
    "cross_entropy_backward",
    "cross_entropy_into",
    "accumulate_",
    "grad_stats",
}
"""Operators of ``esper`` that an epoch of training and a validation call, beside the optimizer's."""

STEPS = {"sgd": "sgd_step_", "adamw": "adamw_step_"}
"""The operator of each ``task.optimizer``."""

FALLBACKS = {
    *(
        "native_batch_norm",
        "_native_batch_norm_legit",
        "cudnn_batch_norm",
        "miopen_batch_norm",
    ),
    *(
        "_batch_norm_with_update",
        "_batch_norm_no_update",
        "native_batch_norm_backward",
        "cudnn_batch_norm_backward",
    ),
    *(
        "_log_softmax",
        "_log_softmax_backward_data",
        "nll_loss_forward",
        "nll_loss_backward",
    ),
    *(
        "_foreach_norm",
        "linalg_vector_norm",
        "_fused_sgd_",
        "_fused_adamw_",
        "_foreach_add_",
        "_foreach_mul_",
    ),
}
"""Operators of ``aten`` that do the same jobs."""


class Calls(TorchDispatchMode):
    """Notes the operators that are called in this thread, with the device of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.esper: dict[str, set[str]] = {}
        self.aten: set[str] = set()

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        namespace, _, name = function.name().partition("::")
        name = name.partition(".")[0]
        if namespace == "esper":
            flat = torch.utils._pytree.tree_leaves((args, kwargs))
            devices = {value.device.type for value in flat if isinstance(value, Tensor)}
            self.esper.setdefault(name, set()).update(devices)
        else:
            self.aten.add(name)
        return function(*args, **(kwargs or {}))


def channels_last_training(device: str, index: int = 0, **task: Any) -> HostTraining:
    """A host of two blocks, 8 and 16 wide, on images of bytes that are cropped and mirrored; a blended seed in one slot
    and one that incubates in another."""
    images = replace(byte_digits(), augmentation=Augmentation(crop=1, flip=True)).to(
        torch.device(device)
    )
    sizes = {"samples_per_epoch": 128, "batch_size": 32, **task}
    config = resolve(
        TrainingConfig.parse(
            {"task": sizes, "env": {"n_envs": 1, "episode_length": 8}}
        ),
        images,
    )
    sites = len(images.build_host().sites)
    totals = make_metrics(1, images.device, 2 + sites, len(images.validation))
    training = HostTraining(index, images, config, totals[0])
    training.reset(0, 0)
    plant(training, "r0c0", "conv_light", stage=SeedStage.HOLDING)
    plant(training, "r1c1", "norm", stage=SeedStage.TRAINING)
    return training


def calls_of(work: Callable[[], object]) -> Calls:
    """All that ``work`` calls in this thread, in backward passes too."""
    with torch.autograd.set_multithreading_enabled(False), Calls() as calls:
        work()
    return calls


def assert_nothing_falls_back(
    training: HostTraining, calls: Calls, device: str
) -> None:
    """Every kernel was used, on the device, and nothing that could stand in for one; the host is all channels_last."""
    kernels = KERNELS | {STEPS[training.config.task.optimizer]}
    assert set(calls.esper) >= kernels, kernels - set(calls.esper)
    assert all(calls.esper[name] <= {device} for name in kernels), calls.esper
    assert not calls.aten & FALLBACKS, calls.aten & FALLBACKS
    norms = [
        module for module in training.host.modules() if isinstance(module, NormReluPool)
    ]
    assert len(norms) == 2
    weights = [p for p in training.host.parameters() if p.dim() == 4]
    assert all(
        weight.is_contiguous(memory_format=torch.channels_last) for weight in weights
    )
