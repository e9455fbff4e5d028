"""The law of the planted task: what simulated hosts and seeds are, and how accurate they become.

Accuracies are pp, T is the horizon.

- Host. Alone it reaches ``floor + (ceiling − floor) · (1 − exp(−t / (host_time · T)))`` after t epochs.
- Plasticity. p(t) = (1 + cos(π t / T)) / 2 falls like a learning rate, so that early epochs count more.
- Maturity of a seed: m = 1 − exp(−x / (seed_time · T)). x grows by p per epoch, times alpha once the seed is blended,
  and times ``incubation_rate`` while it is incubated. Germinated and fading seeds do not learn.
- Worth. A seed adds worth[slot][blueprint] · share[operator] · alpha · m. Some worths are negative, and one blueprint
  is clearly the best of each slot. Two seeds of positive worth in neighbouring slots also add synergy · αm · α'm'.
- Shock. A change of alpha by Δ from one epoch to the next costs accuracy: rising_shock · Δ² · (1 − m) if it rises,
  because the seed is immature, and falling_shock · Δ² · m if it falls, because the host relies on the seed. So blending
  too early, pruning a mature seed, and doing either in one jump cost accuracy. The loss heals by healing · p per epoch.
- Reliance. A host relies on its blended seeds: if one is switched off, because its contribution is measured or because
  it was not kept, accuracy falls by r = reliance · αm in addition to what the seed adds.
- Merges. A merged seed is a part of the host: it goes on maturing as a seed at alpha 1, and nothing switches it off. A
  later seed in its slot has ``returns`` times the worth, for each seed merged there before.
- Noise. Measured accuracies have one error per epoch, with standard deviation ``noise``, which is the same for all
  configurations of a host; contributions and trials have their own errors, with standard deviation ``paired_noise``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from esper.core.action import ActionSpec
from esper.core.observation import KINDS
from esper.core.slots import Floats, Ints
from esper.core.state import MIN_STD, Baseline, Choices, Setting, never_shrinks

T = TypeVar("T")

CHANCE = math.log(10)
"""Loss of a host that guesses among ten classes."""
SETTING = Setting(samples=5_000, updates=40, inputs=64, classes=10, learning_rate=0.05)


@dataclass(frozen=True)
class SimParams:
    """Parameters of the law; see the module's docstring. Raises ValueError for lengths that do not match."""

    slots: tuple[str, ...] = ("r0c0", "r0c1", "r0c2")
    blueprints: tuple[str, ...] = ("moss", "fern", "oak", "ivy")
    worth: tuple[tuple[float, ...], ...] = (
        (3.0, 8.0, -4.0, -3.0),
        (-3.0, 3.0, 9.0, -5.0),
        (7.0, -4.0, -5.0, 3.0),
    )
    """Worth of a seed by slot, then blueprint, pp."""
    share: tuple[float, float, float] = (1.0, 0.8, 0.9)
    """Fraction of its worth that a seed can reach, by blend operator: add, multiply, gate."""
    synergy: float = 1.0
    parameters: tuple[int, ...] = (100, 300, 600, 400)
    """Number of parameters by blueprint; a gated seed has ``gate_parameters`` more."""
    at_once: tuple[bool, ...] = ()
    """Whether seeds are a part of their host at once, by blueprint; empty: none is."""
    merges: tuple[bool, ...] = ()
    """Whether kept seeds can become a part of their host's layers, by blueprint; empty: none can."""
    returns: float = 0.6
    """Factor of the worth of a seed for each one that was merged in its slot before."""
    gate_parameters: int = 50
    host_parameters: int = 1000
    flops: tuple[float, ...] = ()
    """Operations of a forward pass by blueprint, a sample; empty: two for each parameter."""
    host_flops: float = 2000.0
    """Operations of a forward pass of the host, a sample."""
    width: int = 16
    """Units of the layer in each slot. A merge widens it in the ratio in which the host's parameters grow there."""
    setting: Setting = SETTING
    """All that is known of the training of these hosts."""
    floor: float = 10.0
    ceiling: float = 65.0
    host_time: float = 0.2
    curve: tuple[float, ...] | None = None
    """Accuracy of the host alone by number of epochs, pp; None: from floor, ceiling and host_time."""
    seed_time: float = 0.12
    incubation_rate: float = 0.5
    rising_shock: float = 3.0
    falling_shock: float = 5.0
    healing: float = 0.08
    reliance: float = 0.0
    noise: float = 0.3
    paired_noise: float = 0.3
    spread: float = 0.3
    """Standard deviation of the baseline's final accuracy, pp. It is the unit of loss rewards, and so it does not
    depend on the noise."""

    def __post_init__(self) -> None:
        shape = (len(self.slots), len(self.blueprints))
        if np.shape(self.worth) != shape or len(self.parameters) != shape[1]:
            raise ValueError(f"expected worth of shape {shape} [slots, blueprints] and parameters of length {shape[1]}")

    def only(self, blueprints: tuple[str, ...]) -> SimParams:
        """Returns the law for hosts in which only these blueprints can be planted."""
        places = [self.blueprints.index(name) for name in blueprints]

        def of_these(values: Sequence[T]) -> tuple[T, ...]:
            if not values:  # the default of a field
                return ()
            return tuple(values[place] for place in places)

        return replace(
            self,
            blueprints=blueprints,
            worth=tuple(map(of_these, self.worth)),
            parameters=of_these(self.parameters),
            at_once=of_these(self.at_once),
            merges=of_these(self.merges),
            flops=of_these(self.flops),
        )

    @property
    def spec(self) -> ActionSpec:
        """The slots and blueprints."""
        return ActionSpec(self.slots, self.blueprints)

    @property
    def choices(self) -> Choices:
        """The sizes of these hosts and seeds, which are known beforehand."""
        shape = (len(self.slots), len(self.blueprints))
        sizes = np.array(self.parameters) + self.gate_parameters
        # A multiplication and an addition for each parameter.
        flops = np.array(self.flops) if self.flops else 2.0 * sizes
        return Choices(
            host_parameters=self.host_parameters,
            host_flops=self.host_flops,
            parameters=np.tile(sizes, (shape[0], 1)),
            flops=np.tile(flops, (shape[0], 1)),
            widths=np.full(shape[0], self.width),
            kinds=np.zeros((shape[1], len(KINDS))),
            **never_shrinks(shape[0]),
        )

    def host_accuracy(self, epoch: Ints, horizon: int) -> Floats:
        """Returns the accuracy of the host alone after ``epoch`` epochs, pp."""
        if self.curve is not None:
            return np.asarray(np.array(self.curve)[epoch])
        risen = 1 - np.exp(-epoch / (self.host_time * horizon))
        return np.asarray(self.floor + (self.ceiling - self.floor) * risen)

    def loss(self, accuracy: Floats) -> Floats:
        """Returns the validation loss at an accuracy: chance at 10 %, falling linearly."""
        return CHANCE * np.maximum(100 - accuracy, 1.0) / 90

    def baseline(self, horizon: int, episodes: int) -> Baseline:
        """Returns the no-growth baseline: curves without seeds and noise, and a standard deviation from ``spread``."""
        accuracy = self.host_accuracy(np.arange(horizon + 1), horizon)
        return Baseline(
            accuracy=tuple(accuracy.tolist()),
            loss=tuple(self.loss(accuracy).tolist()),
            final_loss_std=max(CHANCE * self.spread / 90, MIN_STD),
            episodes=episodes,
        )
