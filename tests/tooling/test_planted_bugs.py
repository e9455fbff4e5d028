"""Bugs planted in the kernels are found by the kernel tests in the emulator, with either seed."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from tests.cuda import test_grad_stats, test_optimizer, test_stage_batch
from tests.emulation.build import Edit, build
from tests.emulation.device import SEEDS, Emulator, KernelDevice
from tests.selection import slow_except


@dataclass(frozen=True)
class Bug:
    """A change of a source, and the kernel test that it makes fail."""

    edit: Edit
    test: Callable[[KernelDevice], None]
    error: type[Exception] = AssertionError
    message: str | None = None

    @property
    def unit(self) -> str:
        """The source to compile again."""
        shared = {
            "cuda/reduce.cuh": "grad_stats",
            "stage_batch_arguments.h": "stage_batch",
        }
        return shared.get(self.edit.file) or self.edit.file[5:].split(".")[0]


def grad_stats_of_some_chunks(device: KernelDevice) -> None:
    test_grad_stats.test_sizes_around_vectors_and_chunks(
        device, torch.float32, 40 * test_grad_stats.CHUNK + 5
    )


BUGS = {
    "missing_barrier": Bug(
        Edit(
            "cuda/reduce.cuh",
            "warps[threadIdx.x / 32] = sum;\n    __syncthreads();\n",
            "warps[threadIdx.x / 32] = sum;\n",
        ),
        grad_stats_of_some_chunks,
    ),
    "bound_one_too_low": Bug(
        Edit("cuda/sgd.cu", "i < end; i += kThreads", "i < end - 1; i += kThreads"),
        lambda device: test_optimizer.test_sizes_around_chunks_for_sgd(
            device, test_optimizer.CHUNK
        ),
    ),
    "factors_without_a_barrier": Bug(
        Edit("cuda/adamw.cu", "    }\n    __syncthreads();\n", "    }\n"),
        lambda device: test_optimizer.test_sizes_around_chunks_for_adamw(
            device, test_optimizer.CHUNK + 1
        ),
    ),
    "skipped_step_that_counts": Bug(
        Edit(
            "cuda/adamw.cu",
            "launch.scaler) != 0) *table",
            "launch.scaler) >= 0) *table",
        ),
        test_optimizer.test_a_captured_step_of_adamw_counts_and_reads_new_rates_and_coefficients,
    ),
    "short_shared_array": Bug(
        Edit(
            "cuda/reduce.cuh",
            "__shared__ T warps[kThreads / 32];",
            "__shared__ T warps[kThreads / 32 - 1];",
        ),
        grad_stats_of_some_chunks,
        RuntimeError,
        r"has written outside of warps at csrc/cuda/reduce.cuh:\d+, 280 bytes",
    ),
    "short_dynamic_shared_memory": Bug(
        Edit(
            "cuda/stage_batch.cu",
            "(problem.channels) * 256 * sizeof(Out)",
            "(problem.channels) * 255 * sizeof(Out)",
        ),
        lambda device: test_stage_batch.test_one_kernel(device),
        RuntimeError,
        "images_kernel.* has written outside of the dynamic shared memory, 3060 bytes",
    ),
    "wrong_shuffle": Bug(
        Edit(
            "cuda/reduce.cuh",
            "for (int offset = 16; offset > 0; offset /= 2) add(",
            "for (int offset = 8; offset > 0; offset /= 2) add(",
        ),
        grad_stats_of_some_chunks,
    ),
    "shuffle_of_a_part_of_the_warp": Bug(
        Edit(
            "cuda/reduce.cuh",
            "T sum = warp_sum(mine);",
            "T sum = threadIdx.x % 32 < 31 ? warp_sum(mine) : mine;",
        ),
        grad_stats_of_some_chunks,
        RuntimeError,
        r"deadlock: .* threads of block \d+ wait at the shuffle csrc/cuda/reduce.cuh:\d+",
    ),
    "stale_epoch_in_the_kernel_arguments": Bug(
        Edit(
            "stage_batch_arguments.h",
            "return cursor != nullptr ? cursor[0] : epoch;",
            "return epoch;",
        ),
        lambda device: test_stage_batch.test_a_captured_call_moves_on_by_its_cursor(
            device
        ),
    ),
    "counter_that_is_not_reset": Bug(
        Edit("cuda/reduce.cuh", "if (last) *counter = 0;\n", "\n"),
        lambda device: (
            test_grad_stats.test_a_captured_call_can_be_replayed_on_new_values(
                device, 5
            )
        ),
    ),
}


@pytest.mark.parametrize(
    "name", slow_except(["missing_barrier", "bound_one_too_low"], BUGS)
)
def test_a_planted_bug_is_found(name: str) -> None:
    bug = BUGS[name]
    emulator = Emulator(build([bug.unit], namespace=f"esper_{name}", edits=[bug.edit]))
    for seed in SEEDS:
        with emulator.serving(seed), pytest.raises(bug.error, match=bug.message):
            bug.test(emulator)


def test_an_edit_that_fits_no_line_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"occurs 0 times in csrc/cuda/sgd.cu, not once"
    ):
        build(["sgd"], edits=[Edit("cuda/sgd.cu", "no such text", "")])
