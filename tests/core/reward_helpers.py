"""States and transitions of a host for rewards, and the terms that they pay."""

from typing import Any

import numpy as np

from esper.config import RewardConfig
from esper.core.action import Op
from esper.core.reward_modes import Reward
from esper.core.reward_terms import RewardState, Transition
from esper.core.stage import SeedStage

DWELL = 10


def state(*slots: tuple[SeedStage, int], **values: Any) -> RewardState:
    given: dict[str, Any] = {
        "accuracy": 50.0,
        "committed": 50.0,
        "all_off": 50.0,
        "baseline": 50.0,
        "loss": 20.0,
        "committed_loss": 20.0,
        "all_off_loss": 20.0,
        "baseline_loss": 20.0,
        "weighted_share": 0.0,
        "fossil_parameters": 0,
        "stage": np.array([stage for stage, _ in slots], dtype=np.int64),
        "epochs_in_stage": np.array([epochs for _, epochs in slots], dtype=np.int64),
    }
    return RewardState(**{**given, **values})


def transition(
    after: RewardState, before: RewardState | None = None, **values: Any
) -> Transition:
    given: dict[str, Any] = {
        "before": before or state(*[(SeedStage.DORMANT, 0)] * len(after.stage)),
        "after": after,
        "op": Op.WAIT,
        "succeeded": True,
        "rolled_back": False,
        "terminated": False,
        "horizon": 30,
        "budget": 2770.0,
        "doubling": 1.0,
    }
    return Transition(**{**given, **values})


def pay(t: Transition, mode: str = "shaped", **values: Any) -> dict[str, float]:
    return Reward(RewardConfig(mode=mode, **values), DWELL).pay(t)  # type: ignore[arg-type]
