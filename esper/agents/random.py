"""The random controller: a uniform legal op, then uniform legal choices for its heads."""

from __future__ import annotations

import numpy as np

from esper.agents.controller import EnvView, PerEnvController
from esper.spaces.action import HEADS, RELEVANT, Op
from esper.spaces.arrays import Ints


class RandomController(PerEnvController):
    """Acts at random, keyed by (run seed, env, episode, step), so that envs' draws are independent of one another."""

    def choose(self, env: int, view: EnvView) -> Ints:
        key = [
            self.run_seed,
            env,
            int(self.episode[env]),
            int(self.steps[env]),
        ]
        draw = np.random.default_rng(key)
        op = Op(draw.choice(np.flatnonzero(view.masks["op"])))

        # Heads are drawn in their order: which blueprints are legal depends on the slot.
        action = np.zeros(len(HEADS), dtype=np.int64)
        action[0] = op
        for head in RELEVANT[op]:
            if head == "slot":
                legal = view.masks["op_slot"][op]
            elif head == "blueprint":
                legal = view.masks["slot_blueprint"][action[1]]
            else:
                legal = view.masks[head]
            action[HEADS.index(head)] = draw.choice(np.flatnonzero(legal))
        return action
