"""An invented env for controllers, and play of a real one."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.agents.controller import Controller, PerEnvController
from esper.core.action import ActionSpec, Op
from esper.core.mask import ActionMask
from esper.core.observation import BASE, PER_SLOT, ObservationLayout, symlog
from esper.core.stage import STAGES, SeedStage
from esper.env.slot_env import SlotVectorEnv
from tests.core.spaces_helpers import one_observation

S = SeedStage

SPEC = ActionSpec(
    ("r0c0", "r0c1", "r1c0"), ("norm", "conv_light", "depthwise", "attention")
)

LAYOUT = ObservationLayout(SPEC.slots, SPEC.blueprints, 150)


class World:
    """An invented env: observations for the controller, and slots that follow its actions."""

    def __init__(
        self,
        slots: tuple[str, ...] = SPEC.slots,
        offered: tuple[tuple[str, ...], ...] = (),
    ) -> None:
        self.spec = ActionSpec(slots, SPEC.blueprints, offered)
        self.layout = ObservationLayout(slots, SPEC.blueprints, LAYOUT.horizon)
        self.base = {entry.name: 0.0 for entry in BASE}
        self.base["edits_left"] = 1.0
        self.base["epochs"] = float(np.log2(LAYOUT.horizon)) / 10
        self.slots = {slot: {entry.name: 0.0 for entry in PER_SLOT} for slot in slots}
        self.size = np.zeros((len(slots), len(SPEC.blueprints)))
        """Size of each (slot, blueprint) in the observation."""
        self.size_share = np.zeros_like(self.size)
        self.at_once = np.zeros_like(self.size)
        for slot in slots:
            self.put(slot, S.DORMANT)
        self.plateau(10)

    def put(self, slot: str, stage: SeedStage, age: int = 0, **values: float) -> None:
        flags = {
            f"stage_{other.name.lower()}": float(other is stage) for other in STAGES
        }
        self.slots[slot] = {
            **{entry.name: 0.0 for entry in PER_SLOT},
            **flags,
            "age": age / 150,
            **values,
        }

    def plateau(self, epoch: int, accuracy: float = 0.5, loss: float = 1.0) -> None:
        """Observations without progress for five epochs."""
        self.base.update(
            epoch=epoch / 150,
            validation_accuracy=accuracy,
            validation_loss=symlog(loss),
        )
        self.base["epochs_left"] = float(symlog(LAYOUT.horizon - epoch))

    def stage(self, slot: str) -> SeedStage:
        return next(
            stage for stage in STAGES if self.slots[slot][f"stage_{stage.name.lower()}"]
        )

    def masks(self) -> dict[str, NDArray[np.bool_]]:
        table = np.zeros((1, 6, len(self.slots)), dtype=np.bool_)
        stages = [self.stage(slot) for slot in self.spec.slots]
        busy = any(
            stage in (S.GERMINATED, S.TRAINING, S.PRUNED, S.EMBARGOED, S.RESETTING)
            for stage in stages
        )
        for place, stage in enumerate(stages):
            table[0, Op.GERMINATE, place] = stage is S.DORMANT and not busy
            table[0, Op.ADVANCE, place] = stage in (
                S.GERMINATED,
                S.TRAINING,
                S.BLENDING,
            )
            table[0, Op.FOSSILIZE, place] = stage is S.HOLDING
            table[0, Op.PRUNE, place] = stage in (
                S.GERMINATED,
                S.TRAINING,
                S.BLENDING,
                S.HOLDING,
            )
            table[0, Op.SET_ALPHA_TARGET, place] = stage in (S.BLENDING, S.HOLDING)
        fits = [
            [name in self.spec.offers(slot) for name in self.spec.blueprints]
            for slot in self.spec.slots
        ]
        return ActionMask.build(table, np.array([fits])).heads(self.spec)

    def ask(self, controller: Controller) -> tuple[str, str, str]:
        """The controller's op, slot and blueprint."""
        names = ("size", "size_share", "at_once")
        choices = {name: getattr(self, name)[None] for name in names}
        observation = one_observation(self.layout, self.base, self.slots, **choices)[
            None
        ]
        op, slot, blueprint = controller.act(observation, self.masks())[0][:3]
        return Op(op).name, self.spec.slots[slot], self.spec.blueprints[blueprint]


def run(
    env: SlotVectorEnv, controller: PerEnvController, steps: int, seed: int = 4
) -> list[tuple[Any, Any, Any]]:
    """(observation, masks, actions) of every step; a finished env is started again."""
    seen = []
    observation, info = env.reset(seed=seed)
    controller.begin()
    for _ in range(steps):
        masks = info["action_mask"]
        actions = controller.act(observation, masks)
        seen.append((observation, masks, actions))
        observation, _, terminated, _, info = env.step(actions)
        assert not info["illegal_actions"].any()
        if terminated.any():
            observation, info = env.reset(options={"reset_mask": terminated})
            controller.begin(terminated)
    return seen
