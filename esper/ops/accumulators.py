"""Sums of an epoch for all envs and configurations in one buffer, which is read in one transfer."""

from __future__ import annotations

import torch
from torch import Tensor

from esper.ops import _native

# Last dimension of `Accumulators.block`, in the order of csrc/cross_entropy.h.
ACCUMULATOR_FIELDS = ("loss_sum", "correct", "count", "batches", "not_finite")

_native.not_differentiable("accumulate_", in_place=True)
_accumulate = _native.writing(torch.ops.esper.accumulate_.default)


class Accumulators:
    """Statistics of E envs in K configurations, and the correctness of every sample.

    A pass writes only the rows of its own host, so no lock is needed. A training pass uses one configuration and no
    samples.

    Attributes:
        block: float64 ``[E, K, 5]``, last dimension named by ``ACCUMULATOR_FIELDS``:

            ============== ============================================================================================
            ``loss_sum``   sum of the losses of the counted samples (tokens, for language); not finite once one was not
            ``correct``    counted samples whose target has the largest logit
            ``count``      counted samples: those whose target is not ``ignore_index``
            ``batches``    number of calls
            ``not_finite`` counted samples whose loss is NaN or infinite
            ============== ============================================================================================

        correct: ``[E, K, samples]``, of the given dtype: uint8, 1 for a correct sample; int16 for language, the number
            of correct tokens of each sequence (torch hardly supports uint16); float32 for scores of any other kind.
    """

    __slots__ = ("_buffer", "block", "correct")

    def __init__(
        self,
        envs: int,
        configurations: int = 1,
        samples: int = 0,
        dtype: torch.dtype = torch.uint8,
        device: torch.device | str = "cpu",
    ) -> None:
        """Makes zeroed accumulators on ``device``; impossible sizes raise ValueError."""
        if envs < 1 or configurations < 1 or samples < 0:
            raise ValueError(
                "accumulators need envs >= 1, configurations >= 1 and samples >= 0, "
                f"got {envs}, {configurations} and {samples}"
            )

        row = len(ACCUMULATOR_FIELDS) * torch.float64.itemsize + samples * dtype.itemsize  # bytes
        size = envs * configurations * row
        buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        self._view(buffer, (envs, configurations, samples), dtype)

    def _view(self, buffer: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        envs, configurations, _ = shape
        fields = len(ACCUMULATOR_FIELDS)
        head = envs * configurations * fields * torch.float64.itemsize
        self._buffer = buffer  # uint8 [bytes]
        self.block = buffer[:head].view(torch.float64).view(envs, configurations, fields)
        self.correct = buffer[head:].view(dtype).view(shape)

    def __getstate__(self) -> tuple[Tensor, tuple[int, ...], torch.dtype]:
        return self._buffer, tuple(self.correct.shape), self.correct.dtype

    def __setstate__(self, state: tuple[Tensor, tuple[int, ...], torch.dtype]) -> None:
        self._view(*state)  # copies and pickles would make the views tensors of their own

    def read(self) -> Accumulators:
        """Returns a copy on the CPU, made by one transfer; on a GPU this waits for the device."""
        copy = object.__new__(Accumulators)
        copy._view(self._buffer.to("cpu", copy=True), tuple(self.correct.shape), self.correct.dtype)
        return copy


def accumulate_(
    accumulators: Accumulators,
    env: int,
    stats: Tensor,
    configuration: int = 0,
) -> None:
    """Adds the statistics of one :func:`~esper.ops.cross_entropy.cross_entropy` to the row of an env.

    Args:
        accumulators: the accumulators to update.
        env: first index of the row.
        stats: float64 ``[5]``, on the accumulators' device.
        configuration: second index of the row.

    Raises:
        RuntimeError: a row out of range, or ``stats`` of another dtype, shape or device.
    """
    _accumulate(accumulators.block, env, configuration, stats)
