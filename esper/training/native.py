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

from esper.data.split import Split
from esper.ops import _native
from esper.ops.optimizer import gathered
from esper.ops.tape import Program, Unsupported
from esper.training.executor import Cancelled
from esper.training.host_training import HostTraining, feed_of
from esper.training.metrics import EpochMetrics
from esper.training.native_data import NativeData
from esper.training.native_program import (
    Configuration,
    Route,
    route_of,
    training_roles,
    training_tape,
    validation_roles,
    validation_tape,
)
from esper.training.seed_pool import ParameterGroup

_scores = _native.writing(torch.ops.esper.tape_scores_.default)
_EPOCHS = {
    "sgd": _native.writing(torch.ops.esper.tape_epoch_sgd_.default),
    "adamw": _native.writing(torch.ops.esper.tape_epoch_adamw_.default),
}
"""Operators of epochs by the optimizer's name."""
Made = TypeVar("Made")
MAX_PROGRAMS = 32
"""Programs of a host that are kept."""
MOST_FLOPS = 2.5e9
"""Operations of a host in a step, from which on PyTorch's convolutions are faster than Esper's (measured,
benchmarks/results/training_cpu.md): passes forward and back of a batch, without seeds."""


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
        self.data = NativeData(training)
        self.most_flops = most_flops
        self.cancelled_address = cancelled_address
        self.reasons: Counter[str] = Counter()
        self._programs: OrderedDict[Hashable, Any] = OrderedDict()
        self._progress = torch.zeros(1, dtype=torch.int64)

    def forget(self) -> None:
        """Drops the programs of earlier episodes."""
        self._programs.clear()

    def follow_layers(self) -> None:
        """Drops all that was made for layers of other shapes."""
        self.forget()
        vars(self).pop("_flops", None)
        vars(self).pop("_route", None)

    def obstacle(self) -> str | None:
        """Returns the reason why the host without seeds has no native passes; None if it has."""
        try:
            self._check()
            training_tape(self.training, self.data.shape, route_of(self.training.host), self.data.length)
        except Unsupported as reason:
            return str(reason)
        return None

    def train(self, groups: list[ParameterGroup]) -> bool:
        """Trains an epoch that ``prepare_epoch`` has begun; returns False, with nothing done, if that is unsupported.

        Raises Cancelled.
        """
        key = ("training", *training_roles(self.training))
        try:
            program = self.program(key, self._write_training)
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
            program, outputs = self.program(key, lambda: self._write_validation(configurations))
            y = self.data.targets(split.y)
        except Unsupported as reason:
            self.reasons[str(reason)] += 1
            return False
        training = self.training
        length = self.data.length
        count = len(configurations)
        size = training.task.evaluation_batch
        sums = totals.stats(count)
        for start in range(0, len(split), size):
            stop = min(start + size, len(split))
            x = self.data.samples(split.inputs(start, stop))
            scores = totals.correct(count)[:, start:stop]
            of_samples = scores
            if length > 1:
                of_samples = scores.new_empty((count, len(x)), dtype=torch.uint8)
            _scores(
                *program.arguments,
                program.ends,
                outputs,
                x,
                y[length * start : length * stop],
                *self.data.objective,
                0.0,  # labels are not smoothed
                sums,
                of_samples,
                self.data.chunk,
            )
            if length > 1:
                positions = of_samples.view(count, -1, length)
                scores.copy_(positions.sum(dim=2))
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
        _ = self.data.objective
        self.data.targets(feed.split.y)
        if self.most_flops is not None and self._flops > self.most_flops:
            raise Unsupported(
                f"with {self._flops / 1e6:.0f} MFLOP a step PyTorch is faster; run.tier=native does not ask"
            )

    @cached_property
    def _flops(self) -> float:
        """Operations of the host in a step. Raises Unsupported."""
        training = self.training
        alone = [(0.0,) * len(training.sites)]
        host, _ = validation_tape(training, self.data.shape, self._route, alone, self.data.length)
        samples = training.config.task.batch_size * self.data.length
        return 3.0 * host.flops * samples  # back is twice forward

    @cached_property
    def _route(self) -> Route:
        """The layers of the host. Raises Unsupported."""
        return route_of(self.training.host)

    def program(self, key: Hashable, write: Callable[[], Made]) -> Made:
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
        return training_tape(self.training, self.data.shape, self._route, self.data.length).program()

    def _write_validation(self, configurations: list[Configuration]) -> tuple[Program, list[int]]:
        tape, outputs = validation_tape(
            self.training,
            self.data.shape,
            self._route,
            configurations,
            self.data.length,
        )
        return tape.program(), outputs

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
        steps = gathered([group.optimizer for group in groups])
        if not steps:
            raise Unsupported("nothing learns in the epoch")
        if len(steps) > 1:
            raise Unsupported("parameters are stepped with different options")
        (step,) = steps
        coefficients = torch.ones(len(step.rates), dtype=torch.float64)
        rates = [training.warmup, *training.seed_rates.values()]
        config = training.config.task
        stats = training.gradient_stats
        self._progress.zero_()
        try:
            _EPOCHS[config.optimizer](
                *program.arguments,
                program.ends,
                *self.data.batches(),
                feed.seed,
                feed.epoch,
                feed.augmentation.crop,
                feed.augmentation.flip,
                *self.data.objective,
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
        if done < feed.batches:
            raise Cancelled(f"env {training.index}, epoch {training.epoch}: cancelled before batch {done}")
