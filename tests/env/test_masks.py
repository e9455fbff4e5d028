"""Masks in the info dict and as other libraries read them."""

import numpy as np

from esper.core.action import Op
from tests.core.blueprints.test_cnn import FORMULAS
from tests.core_helpers import rig


def test_masks_of_heads_are_joined_as_other_libraries_read_them() -> None:
    with rig(n_envs=2) as world:
        flat, heads = world.env.action_masks(), world.info["action_mask"]
        assert flat.dtype == np.bool_
        place = 0
        for name, size in zip(
            (
                "op",
                "slot",
                "blueprint",
                "style",
                "tempo",
                "alpha_target",
                "alpha_speed",
                "alpha_curve",
            ),
            (6, 4, len(FORMULAS), 4, 3, 3, 4, 5),
            strict=True,
        ):
            assert np.array_equal(flat[:, place : place + size], heads[name])
            place += size
        assert place == flat.shape[1]
        assert heads["op"].tolist() == [[True, True, False, False, False, False]] * 2


def test_the_mask_in_info_is_that_of_the_state_in_the_observation() -> None:
    with rig() as world:
        world.do("GERMINATE", "r1c0", "norm")
        legal = world.info["action_mask"]["op_slot"][0]
        place = world.env.action_spec.slots.index("r1c0")
        assert world.value("r1c0/stage_germinated") == 1
        assert [op.name for op in Op if legal[op, place]] == [
            "WAIT",
            "PRUNE",
            "ADVANCE",
        ]
        assert not legal[Op.GERMINATE].any()
