"""A host's epochs and validations as single calls of compiled code, which runs them without Python and its lock.

What has no compiled form raises Unsupported, and is left to PyTorch; so are streamed data, micro-batches, other formats
than float32, and random numbers that modules draw.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from esper.data.objective import (
    ClassObjective,
    Explained,
    SampleObjective,
    binary_losses,
    label_accuracy,
    squared_error,
)
from esper.data.split import Split
from esper.ops.optimizer import gathered
from esper.ops.tape import LOSSES, SCORES, Program, Shape, Unsupported
from esper.training.executor import Cancelled
from esper.training.host_training import HostTraining, feed_of
from esper.training.metrics import EpochMetrics
from esper.training.native_program import (
    Configuration,
    training_roles,
    training_tape,
    validation_roles,
    validation_tape,
)
from esper.training.seed_pool import ParameterGroup

Made = TypeVar("Made")
MAX_PROGRAMS = 32
"""Programs of a host that are kept."""
MOST_FLOPS = 2.5e9
"""Operations of a host in a step, from which on PyTorch's convolutions are faster than Esper's (measured,
benchmarks/results/training_cpu.md): passes forward and back of a batch, without seeds."""
LOSS_OF = ((squared_error, "squared_error"), (binary_losses, "binary_cross_entropy"))
CHUNK = 128
"""Samples of a validation that pass through the layers together."""
POSITIONS = 512
"""Positions of sequences that do, of one sequence or more."""


class NativePasses:
    """The native passes of one host.

    Args:
        training: the host.
        cancelled_address: where a bool lies in memory that ends an epoch between two batches once it is true; 0: none.
        most_flops: hosts with more operations in a step have no native passes; None: any may have them.

    Attributes:
        reasons: why passes were left to PyTorch, each with the number of epochs and validations.
    """

    def __init__(
        self,
        training: HostTraining,
        cancelled_address: int = 0,
        most_flops: float | None = None,
    ) -> None:
        self.training = training
        self.most_flops = most_flops
        self.cancelled_address = cancelled_address
        self.reasons: Counter[str] = Counter()
        self._programs: OrderedDict[Hashable, Any] = OrderedDict()
        self._progress = torch.zeros(1, dtype=torch.int64)

    def forget(self) -> None:
        """Drops the programs of earlier episodes."""
        self._programs.clear()

    def obstacle(self) -> str | None:
        """Returns the reason why the host without seeds has no native passes; None if it has."""
        try:
            self._check()
            self._write_training()
        except Unsupported as reason:
            return str(reason)
        return None

    def train(self, groups: list[ParameterGroup]) -> bool:
        """Trains an epoch that ``prepare_epoch`` has begun; returns False, with nothing done, if that is unsupported.

        Raises Cancelled.
        """
        key = ("training", *training_roles(self.training))
        try:
            program = self._program(key, self._write_training)
            self._train(program, groups)
        except Unsupported as reason:
            self.reasons[str(reason)] += 1
            return False
        return True

    def evaluate(
        self,
        split: Split,
        configurations: list[Configuration],
        branching: Hashable,
        totals: EpochMetrics,
    ) -> bool:
        """Evaluates into ``totals`` with the alphas in ``tried``; returns False, with nothing done, if unsupported."""
        key = ("validation", branching, *validation_roles(self.training))
        try:
            program, outputs = self._program(key, lambda: self._write_validation(configurations))
            y = self._targets(split.y)
        except Unsupported as reason:
            self.reasons[str(reason)] += 1
            return False
        training = self.training
        count = len(configurations)
        size = training.task.evaluation_batch
        sums = totals.stats(count)
        for start in range(0, len(split), size):
            stop = min(start + size, len(split))
            scores = totals.correct(count)[:, start:stop]
            of_positions = scores
            if self._length > 1:
                of_positions = scores.new_empty((count, (stop - start) * self._length), dtype=torch.uint8)
            torch.ops.esper.tape_scores_(
                *program.arguments,
                program.ends,
                outputs,
                self._samples(split.inputs(start, stop)),
                y[self._length * start : self._length * stop],
                *self._objective,
                0.0,
                sums,
                of_positions,
                CHUNK if self._length == 1 else self._length * max(1, POSITIONS // self._length),
            )
            if self._length > 1:
                torch.sum(of_positions.view(count, -1, self._length), dim=2, dtype=scores.dtype, out=scores)
        return True

    def _check(self) -> None:
        """Raises Unsupported for what no layer is the reason of."""
        training = self.training
        feed = training.feed
        if training.device.type != "cpu":
            raise Unsupported("native passes are a CPU's")
        if feed is None:
            raise Unsupported("streamed data is read by Python")
        if training.config.task.micro_batches > 1:
            raise Unsupported("micro-batches are passes of PyTorch")
        if training.arithmetic.precision != "float32":
            raise Unsupported(f"native passes are in float32, not in {training.arithmetic.precision}")
        _ = self._objective
        self._targets(feed.split.y)
        if self.most_flops is not None and self._flops > self.most_flops:
            raise Unsupported(
                f"with {self._flops / 1e6:.0f} MFLOP a step PyTorch is faster; run.tier=native does not ask"
            )

    @cached_property
    def _objective(self) -> tuple[int, int, Tensor | None]:
        """The numbers of the loss and the score, and the variance of targets for r2. Raises Unsupported."""
        objective = self.training.task.objective
        loss = "cross_entropy"
        score = "accuracy"
        variance = None
        if isinstance(objective, SampleObjective):
            names = [name for function, name in LOSS_OF if function is objective.loss]
            if not names:
                raise Unsupported("losses other than cross_entropy, mse and bce have no compiled form")
            (loss,) = names
            score = "labels"
            if isinstance(objective.score, Explained):
                score = "explained"
                variance = objective.score.variance.to(self._dtype).contiguous()
            elif objective.score is not label_accuracy:
                raise Unsupported("scores other than accuracy and r2 have no compiled form")
        return LOSSES.index(loss), SCORES.index(score), variance

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.training.host.parameters()).dtype

    def _targets(self, y: Tensor) -> Tensor:
        """Returns targets as operators take them. Raises Unsupported."""
        if isinstance(self.training.task.objective, ClassObjective):
            if y.shape[1:] != (self._length,) * (self._length > 1):
                raise Unsupported("cross_entropy with several targets a sample has no compiled form")
            return y.reshape(-1).contiguous()
        if y.dim() > 2:
            raise Unsupported("targets of several dimensions a sample have no compiled form")
        if torch.promote_types(self._dtype, y.dtype) != self._dtype:
            raise Unsupported(f"targets in {y.dtype} for outputs in {self._dtype} have no compiled form")
        return y.to(self._dtype).contiguous()

    @cached_property
    def _flops(self) -> float:
        """Operations of the host in a step. Raises Unsupported."""
        training = self.training
        host, _ = validation_tape(training, self._shape(), [(0.0,) * len(training.sites)], self._length)
        return 3.0 * host.flops * training.config.task.batch_size * self._length  # back is twice forward

    @cached_property
    def _length(self) -> int:
        """Positions of the sequences of tokens; 1 for other samples."""
        training = self.training
        x = None if training.feed is None else training.feed.x
        tokens = isinstance(x, Tensor) and x.dtype is torch.int64 and x.dim() == 2
        if tokens and training.host.topology == "transformer":
            return x.shape[1]  # type: ignore[union-attr]
        return 1

    def _samples(self, x: Tensor) -> Tensor:
        """Returns inputs as operators take them: of sequences, each position is a sample, with its token as a number."""
        if self._length == 1:
            return x
        return x.reshape(-1, 1).to(self._dtype)

    def _shape(self) -> Shape:
        if self._length > 1:
            return 1, 1, 1
        x = feed_of(self.training).x
        if not isinstance(x, Tensor) or x.dim() not in (2, 4) or not x.is_floating_point():
            raise Unsupported("inputs other than vectors and images of numbers have no compiled form")
        channels, height, width = (*x.shape[1:], 1, 1)[:3]
        return channels, height, width

    def _program(self, key: Hashable, write: Callable[[], Made]) -> Made:
        """Returns what ``write`` made the first time for this key. Raises Unsupported, again if it did."""
        found = self._programs.pop(key, None)
        if found is None:
            try:
                self._check()
                found = write()
            except Unsupported as reason:
                found = reason
        self._programs[key] = found
        if len(self._programs) > MAX_PROGRAMS:
            self._programs.popitem(last=False)
        if isinstance(found, Unsupported):
            raise found
        return found  # type: ignore[no-any-return]

    def _write_training(self) -> Program:
        return training_tape(self.training, self._shape(), self._length).program()

    def _write_validation(self, configurations: list[Configuration]) -> tuple[Program, list[int]]:
        tape, outputs = validation_tape(self.training, self._shape(), configurations, self._length)
        return tape.program(), outputs

    def _batches(self) -> tuple[Any, ...]:
        """The data of an epoch as operators take it: inputs, targets, table, room for a batch, order and batch size."""
        feed = feed_of(self.training)
        split = feed.split
        if self._length == 1:
            staged = None if split.table is None else feed.x
            return split.x, self._targets(split.y), split.table, staged, feed.order, feed.batch_size
        x = self._samples(split.x[feed.order])
        y = self._targets(split.y[feed.order])
        return x, y, None, None, torch.arange(len(x)), feed.batch_size * self._length

    def _train(self, program: Program, groups: list[ParameterGroup]) -> None:
        training = self.training
        feed = feed_of(training)
        for group in groups:
            group.drop_gradients()
        for parameter, gradient in zip(program.parameters, program.gradients, strict=True):
            parameter.grad = gradient
        owned = []
        sizes = []
        flags = []
        for group in groups:
            gradients = [gradient for gradient in group.gradients if gradient is not None]
            owned += gradients
            sizes.append(len(gradients))
            if group.site is not None and group.site.planted is not None:
                flags.append(group.site.planted.finite)
        step = gathered([group.optimizer for group in groups])
        if step is None:
            raise Unsupported("nothing learns in the epoch")
        coefficients = torch.ones(len(step.rates), dtype=torch.float64)
        rates = [training.warmup, *training.seed_rates.values()]
        config = training.config.task
        stats = training.gradient_stats
        self._progress.zero_()
        operator = torch.ops.esper.tape_epoch_sgd_
        if config.optimizer == "adamw":
            operator = torch.ops.esper.tape_epoch_adamw_
        try:
            operator(
                *program.arguments,
                program.ends,
                *self._batches(),
                feed.seed,
                feed.epoch,
                feed.augmentation.crop,
                feed.augmentation.flip,
                *self._objective,
                config.label_smoothing,
                training.totals.training,
                [rate.rate for rate in rates],
                [rate.factor for rate in rates],
                [rate.steps for rate in rates],
                [rate.done for rate in rates],
                flags,
                [int(row == 0 or group.with_host) for row, group in enumerate(groups)],
                stats.total,
                self.cancelled_address,
                self._progress,
                coefficients,
                owned,
                sizes,
                config.max_grad_norm,
                config.exploding_norm,
                *step.arguments(coefficients),
            )
        finally:
            done = int(self._progress)
            training.batch = min(done, max(feed.batches - 1, 0))
            stats.batches += done
            torch.autograd.graph.increment_version(step.params)
        if done < feed.batches:
            raise Cancelled(f"env {training.index}, epoch {training.epoch}: cancelled before batch {done}")
