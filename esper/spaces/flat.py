"""All joint actions of a host in one list, for agents with a single discrete choice."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from esper.spaces.action import HEADS, RELEVANT, ActionSpec, Op
from esper.spaces.mask import ActionMask, Bools


def joint_actions(spec: ActionSpec) -> NDArray[np.int64]:
    """Returns every joint action once, int64 [N, 8], WAIT first; heads that do not matter for an op are 0."""
    rows: list[tuple[int, ...]] = []
    for op in Op:
        choices = [range(n) if head in RELEVANT[op] else (0,) for head, n in zip(HEADS, spec.sizes, strict=True)]
        rows += itertools.product((int(op),), *choices[1:])
    return np.array(rows, dtype=np.int64)


def legal_joint_actions(actions: NDArray[np.int64], masks: Mapping[str, Bools]) -> Bools:
    """Returns whether each joint action [N, 8] is legal, bool [E, N]; ``masks`` is ``info["action_mask"]``."""
    mask = ActionMask(masks["op"], masks["op_slot"], masks["slot_blueprint"])
    return mask.legal(np.arange(len(mask.op))[:, None], actions)
