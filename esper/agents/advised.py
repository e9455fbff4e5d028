"""A controller that widens a host before its first epoch, as an advisor says."""

from __future__ import annotations

import math
from collections.abc import Sequence

from esper.agents.advisor import Advisor, HostFacts, shipped
from esper.agents.controller import EnvView, PerEnvController
from esper.config import ConfigError
from esper.core.action import Op
from esper.core.arrays import Ints
from esper.core.sizing import FACTORS, WIDENINGS

NEEDED = {
    "samples_known": "the number of training samples",
    "updates_known": "the number of steps in an epoch",
    "chance_known": "the number of classes",
    "inputs": "the size of a sample",
    "host_flops": "the operations of a pass",
}
"""Facts that must be known of a training, by an entry that is 0 if they are not."""


class AdvisedController(PerEnvController):
    """Widens all layers that it can by one multiple, at the start, and lets the host train from then on.

    The multiple is the one whose predicted gain exceeds its price by most, see :class:`esper.agents.advisor.Advisor`;
    where none is worth its price, nothing grows.
    """

    EPISODE_STATE = ("planned", "left", "reasons")
    advisor: Advisor

    def prepare(self) -> None:
        self.widenings = {multiple: name for multiple, name in WIDENINGS.items() if name in self.spec.blueprints}
        if not self.widenings:
            raise ConfigError(
                f"the advisor widens layers: env.blueprints must name one of {', '.join(WIDENINGS.values())}, "
                f"not only {', '.join(self.spec.blueprints)}"
            )
        self.advisor = shipped()
        self.planned = [False] * self.n_envs
        self.left: list[list[list[str]]] = [[] for _ in range(self.n_envs)]
        """Slot and blueprint of each seed that is still to be planted, by env."""
        self.reasons = [""] * self.n_envs
        """The expectation behind each env's plan, in words."""

    def begin_episode(self, env: int) -> None:
        self.planned[env] = False
        self.left[env] = []
        self.reasons[env] = ""

    def acts_again(self, env: int, view: EnvView) -> bool:
        return True

    def choose(self, env: int, view: EnvView) -> Ints:
        if not self.planned[env]:
            self.planned[env] = True
            self.left[env], self.reasons[env] = self._plan(view)
        while self.left[env]:
            slot, blueprint = self.left[env].pop(0)
            if view.legal(Op.GERMINATE, slot, blueprint):
                return self.spec.encode(Op.GERMINATE, slot, blueprint)
        return self.spec.encode(Op.WAIT)

    def _plan(self, view: EnvView) -> tuple[list[list[str]], str]:
        """Returns the slot and blueprint of each seed to plant, and why.

        Multiples that are too large for the budget in some slot are not on offer. A seed that does not fit beside those
        planted before it is left out.
        """
        smallest = min(self.widenings)
        slots = [slot for slot in self.spec.slots if view.legal(Op.GERMINATE, slot, self.widenings[smallest])]
        if not slots:
            return [], "no layer can be widened within the budget"
        multiples = []
        for multiple, name in self.widenings.items():
            if all(view.legal(Op.GERMINATE, slot, name) for slot in slots):
                multiples.append(multiple)
        price = math.expm1(view.value("price"))
        facts = facts_in(view, slots, multiples)
        chosen = self.advisor.choose(facts, price)
        plan = []
        if chosen > 1:
            plan = [[slot, self.widenings[chosen]] for slot in slots]
        return plan, self.advisor.words(facts, price)


def facts_in(
    view: EnvView,
    slots: Sequence[str],
    multiples: Sequence[int],
) -> HostFacts:
    """Reads what is known of a training before its first epoch from an observation.

    Raises ConfigError if one of ``NEEDED`` is not known.
    """
    unknown = [words for entry, words in NEEDED.items() if not view.value(entry)]
    if unknown:
        raise ConfigError(
            f"the advisor must know {', '.join(unknown)}: esper.Grower takes samples=, the loader, and classes="
        )
    name = WIDENINGS[multiples[0]]
    sizes = [math.expm1(10 * view.choice(slot, name, "size")) for slot in slots]
    parameters = _power(view, "host_parameters", 10)
    around = sum(sizes) / (multiples[0] - 1)
    classes = round(_power(view, "classes", 10))
    # Weights between two of these layers are counted twice. Beside layers that stay as they are, their number is not
    # seen, and taken for less than it is.
    between = max(0.0, around + classes - parameters)
    return HostFacts(
        widths=tuple(2 ** (10 * view.slot(slot, "width")) for slot in slots),
        parameters=parameters_by_multiple(parameters, around, between, multiples),
        operations=_power(view, "host_flops", 20) - 1,
        inputs=round(_power(view, "inputs", 10)),
        classes=classes,
        convolutional=any(view.choice(slot, name, "spatial") > 0 for slot in slots),
        samples=round(_power(view, "samples", 10)),
        epochs=round(_power(view, "epochs", 10)),
        updates=_power(view, "updates_left", 10) - 1,
        rate=_power(view, "learning_rate", 10),
    )


def parameters_by_multiple(
    parameters: float,
    around: float,
    between: float,
    multiples: Sequence[int] = FACTORS[1:],
) -> dict[int, float]:
    """Returns the number of parameters of a network with all layers widened, by multiple; 1 comes first.

    ``around`` is the sum of the parameters of seeds that double one layer each: the weights into and out of it but for
    the biases of the next layer. So it counts the weights ``between`` two of these layers twice, which grow with the
    square of the multiple.
    """
    outer = around - 2 * between
    fixed = parameters - outer - between
    counts = {1: parameters}
    for multiple in multiples:
        counts[multiple] = fixed + outer * multiple + between * multiple**2
    return counts


def _power(view: EnvView, entry: str, scale: int) -> float:
    """Returns what an entry is the binary logarithm of, divided by ``scale``."""
    return float(2 ** (scale * view.value(entry)))
