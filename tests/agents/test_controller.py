"""The view of one env, and the controller that never grows."""

import pytest

from esper.agents.controller import EnvView, NoGrowth
from esper.spaces.action import Op
from tests.agents.control_helpers import LAYOUT, SPEC, S, World
from tests.spaces.spaces_helpers import one_observation


def test_a_view_reads_the_observation_by_name() -> None:
    world = World()
    world.put("r0c1", S.HOLDING, age=37, blueprint=2.0, contribution=0.3)
    masks = {name: mask[0] for name, mask in world.masks().items()}
    view = EnvView(
        SPEC, LAYOUT, one_observation(LAYOUT, world.base, world.slots), masks
    )
    assert (view.epoch, view.age("r0c1"), view.stage("r0c1")) == (10, 37, S.HOLDING)
    assert (view.blueprint("r0c1"), view.blueprint("r0c0")) == ("conv_light", None)
    assert view.slot("r0c1", "contribution") == pytest.approx(0.3)
    assert view.legal(Op.FOSSILIZE, "r0c1")
    assert not view.legal(Op.FOSSILIZE, "r0c0")
    assert view.legal(Op.GERMINATE, "r0c0", "norm")
    assert not view.legal(Op.GERMINATE, "r0c1", "norm")


def test_no_growth_waits() -> None:
    world, controller = World(), NoGrowth(SPEC, LAYOUT, 1)
    world.put("r0c0", S.HOLDING, gate_passed=1.0, contribution=1.0)
    controller.begin()
    assert world.ask(controller)[0] == "WAIT"
