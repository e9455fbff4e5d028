"""PlantedVectorEnv: simulated hosts whose accuracy follows a known law, with the API of hosts in training.

Spaces, masks, lifecycle, gates, rewards and info are those of GrowthVectorEnv; only training is replaced, by the law
(``planted_law``), and no host ever goes bad. Everything is an array over envs, so that a controller can be tried on
hundreds of thousands of steps in a minute, and the best return is known (``benchmarks/planted_best.py``).
"""

from __future__ import annotations

from gymnasium.vector import AutoresetMode

from esper.config import TrainingConfig
from esper.config.resolved import ResolvedConfig
from esper.core.chosen import choose_blueprints
from esper.core.state import Baseline
from esper.data.facts import N_ENVS
from esper.env.planted_backend import PlantedBackend
from esper.env.planted_law import SimParams
from esper.env.slot_env import SlotVectorEnv
from esper.telemetry.span import Spans
from esper.training.execution.multi_gpu import chosen_devices

NAME = "planted"
EPISODE_LENGTH = 50
ROUNDS = 1
LEARNING_ROUNDS = 60


def resolve(config: TrainingConfig) -> ResolvedConfig:
    """Returns the config with the planted task's sizes in place of None."""
    env = config.env
    sizes = {
        "n_envs": env.n_envs or N_ENVS,
        "episode_length": env.episode_length or EPISODE_LENGTH,
        "slots": env.slots,
        "at_once": bool(env.at_once),
    }
    default = LEARNING_ROUNDS if config.run.learns else ROUNDS
    rounds = config.run.rounds or default
    run = {
        "rounds": rounds,
        "device": chosen_devices(config.run.device),
    }
    tables = config.tables_with({"env": sizes, "run": run})
    return ResolvedConfig.parse(tables)


class PlantedVectorEnv(SlotVectorEnv):
    """Simulated hosts under ``law``; see GrowthVectorEnv for the API.

    By default, ``config`` has 64 envs and 50 epochs; its ``env.blueprints`` selects from those of the law.
    """

    def __init__(
        self,
        config: TrainingConfig | None = None,
        law: SimParams | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.DISABLED,
    ) -> None:
        config = resolve(config or TrainingConfig())
        law = law or SimParams()
        law = law.only(choose_blueprints(config.env.blueprints, law.blueprints, "simulated hosts"))
        spec = law.spec
        n_envs = config.env.n_envs
        self.law = law
        self.backend: PlantedBackend = PlantedBackend(
            law,
            n_envs,
            config.env.episode_length,
            config.env.counterfactual_every or 1,
        )
        super().__init__(
            config,
            spec,
            self.backend,
            Spans(marks=config.telemetry.debug),
            law.choices,
            law.setting,
            autoreset_mode,
        )
        self.baseline = self._no_growth()

    def _no_growth(self) -> Baseline:
        if self.baseline is not None:
            return self.baseline
        return self.law.baseline(self.horizon, self.config.env.baseline_episodes)
