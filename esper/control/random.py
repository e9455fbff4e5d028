"""The random controller: a uniform legal op, then uniform legal choices for its heads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from esper.control.controller import EnvView, PerEnvController
from esper.spaces.action import HEADS, RELEVANT, Op


class RandomController(PerEnvController):
    """Acts at random, keyed by (run seed, env, episode, step), so that envs' draws are independent of one another."""

    def choose(self, env: int, view: EnvView) -> NDArray[np.int64]:
        draw = np.random.default_rng([self.run_seed, env, int(self.episode[env]), int(self.steps[env])])
        op = Op(draw.choice(np.flatnonzero(view.masks["op"])))
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
