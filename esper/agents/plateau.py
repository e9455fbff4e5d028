"""A rule that grows a network when its training stalls."""

from __future__ import annotations

import math

from esper.agents.controller import EnvView
from esper.agents.heuristic import HeuristicController
from esper.config import TrainingConfig
from esper.spaces.action import ActionSpec, Op
from esper.spaces.arrays import Ints
from esper.spaces.observation import ObservationLayout


class PlateauController(HeuristicController):
    """Plants only at a plateau: when the best validation accuracy has not risen by more than a margin for a while.

    A plateau begins anew with each seed that is planted, so that a seed is judged before the next one comes. Which seed
    is planted, and whether it is blended, kept or removed, is decided as ``heuristic`` does.

    Settings are in ``config.plateau`` and ``config.heuristic``.
    """

    EPISODE_STATE = (*HeuristicController.EPISODE_STATE, "best")

    def __init__(
        self,
        spec: ActionSpec,
        layout: ObservationLayout,
        n_envs: int,
        run_seed: int = 0,
        config: TrainingConfig | None = None,
    ) -> None:
        config = config or TrainingConfig()
        super().__init__(spec, layout, n_envs, run_seed, config)
        self.margin = config.plateau.margin
        window = math.ceil(config.plateau.window * layout.horizon)
        self.window = max(config.plateau.min_window_epochs, window)
        """Length of a plateau in epochs."""
        self.best: list[list[float]] = [[] for _ in range(n_envs)]
        """Best accuracy (pp) at each decision since the last seed was planted."""

    def begin_episode(self, env: int) -> None:
        super().begin_episode(env)
        self.best[env] = []

    def choose(self, env: int, view: EnvView) -> Ints:
        self.best[env].append(100 * view.value("best_accuracy"))
        action = super().choose(env, view)
        # A plateau begins anew.
        if action[0] == Op.GERMINATE:
            self.best[env] = self.best[env][-1:]
        return action

    def _may_plant(self, env: int, view: EnvView) -> bool:
        best = self.best[env]
        if len(best) <= self.window:
            return False
        risen = best[-1] - best[-1 - self.window]
        return risen <= self.margin and super()._may_plant(env, view)
