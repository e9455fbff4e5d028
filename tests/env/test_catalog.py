"""Sizes and kinds of blueprints, known before they are planted."""

from typing import Any

import numpy as np
import pytest
from torch import nn

from esper.config import ConfigError
from esper.core.action import ActionSpec
from esper.core.blend import gate_parameters
from esper.core.blueprints import BLUEPRINTS, BlueprintRegistry
from esper.core.place import Place
from esper.env.catalog import BlueprintCatalog

PLACES = [Place("r0c0", 8), Place("r0c1", 16)]
SPEC = ActionSpec(("r0c0", "r0c1"), ("norm", "conv_light", "attention"))


def test_a_size_is_that_of_the_gated_style_which_is_the_largest() -> None:
    sizes = BlueprintCatalog("cnn", PLACES, BLUEPRINTS, SPEC).parameters()
    for s, channels in enumerate((8, 16)):
        for b, name in enumerate(SPEC.blueprints):
            body = BLUEPRINTS.get("cnn", name).build(channels)
            assert sizes[s, b] == sum(
                p.numel() for p in body.parameters()
            ) + gate_parameters(channels)


def test_a_size_is_zero_where_a_blueprint_does_not_fit_and_has_no_gate_at_a_source() -> (
    None
):
    layers = (nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 6))
    spec = ActionSpec(("r0c0", "r0c1"), ("norm", "widen_whole"))
    sizes = BlueprintCatalog(
        "mlp", [Place("r0c0", 6), Place("r0c1", 6, True, layers)], BLUEPRINTS, spec
    ).parameters()
    np.testing.assert_array_equal(
        sizes, [[12 + gate_parameters(6), 0], [0, 5 * 4 + 4 + 4 * 6]]
    )


def test_what_fits_is_listed_by_slot_unless_all_does_everywhere() -> None:
    layers = (nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 6))
    places = [Place("r1c0", 6, True, layers), Place("r0c0", 6)]
    listed = BlueprintCatalog.select(
        "mlp", places, BLUEPRINTS, ("norm", "widen_whole")
    ).spec
    assert listed.offered == (("norm",), ("widen_whole",))
    everywhere = BlueprintCatalog.select("mlp", places[1:], BLUEPRINTS, ("norm", "mlp"))
    assert everywhere.spec.offered == ()


def test_kinds_tell_layers_and_the_parts_of_parameters_that_look_around_or_scale() -> (
    None
):
    norm, conv, _ = (
        BlueprintCatalog("cnn", PLACES[:1], BLUEPRINTS, SPEC).kinds().tolist()
    )
    assert norm == [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]  # no layer, only scales and shifts
    assert conv[0] > 0
    assert conv[1] > 0.8  # mostly weights of a 3×3 convolution


@pytest.mark.parametrize("at_once", [False, True])
def test_kinds_tell_what_a_seed_reads_and_how_it_begins(at_once: bool) -> None:
    layers = (nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 6))
    spec, places = (
        ActionSpec(("r0c0", "r0c1"), ("norm", "widen_whole")),
        [PLACES[0], Place("r0c1", 6, True, layers)],
    )
    norm, widening = (
        BlueprintCatalog("mlp", places, BLUEPRINTS, spec).kinds(at_once).tolist()
    )
    assert norm[3:] == [0, 0, 0]
    assert widening[3:] == [1, 1, at_once]


def test_kinds_are_the_same_each_time_and_draw_nothing_global() -> None:
    np.testing.assert_array_equal(
        BlueprintCatalog("cnn", PLACES[:1], BLUEPRINTS, SPEC).kinds(),
        BlueprintCatalog("cnn", PLACES[:1], BLUEPRINTS, SPEC).kinds(),
    )


def test_a_blueprint_that_cannot_be_built_is_an_error_that_names_it() -> None:
    registry = BlueprintRegistry()

    @registry.register("cnn", "odd", parameters=lambda channels: channels)
    def odd(channels: int) -> nn.Module:
        raise ValueError(f"{channels} is even")

    wanted = r"^blueprint odd cannot be built for 8 channels: ValueError: 8 is even; repair it, or leave it out of env"
    with pytest.raises(ConfigError, match=wanted):
        BlueprintCatalog(
            "cnn", PLACES[:1], registry, ActionSpec(("r0c0",), ("odd",))
        ).kinds()


def test_a_blueprint_that_does_not_say_its_size_is_an_error_that_names_it() -> None:
    registry = BlueprintRegistry()
    registry.register("cnn", "odd", parameters=lambda channels: channels // 0)(
        nn.Identity
    )
    with pytest.raises(
        ConfigError,
        match=r"^blueprint odd cannot be counted for 8 channels: ZeroDivisionError: ",
    ):
        BlueprintCatalog(
            "cnn", PLACES[:1], registry, ActionSpec(("r0c0",), ("odd",))
        ).parameters()


@pytest.mark.parametrize(
    ("parameters", "wanted"),
    [
        (
            lambda place: 0,
            "ValueError: its `parameters` says 0, and a seed needs some to train",
        ),
        (lambda place: place.layers[0].in_features, "IndexError"),
    ],
)
def test_a_blueprint_that_misjudges_its_place_is_an_error_that_names_both(
    parameters: Any, wanted: str
) -> None:
    registry = BlueprintRegistry()
    registry.register("mlp", "odd", parameters=parameters, reads_source=True)(
        nn.Identity
    )
    place = Place("r2c0", 6, True, obstacle="add reads it")
    where = r"^blueprint odd cannot be counted for the Place of slot r2c0, whose layers are not known \(add reads it\): "
    with pytest.raises(ConfigError, match=where + wanted):
        BlueprintCatalog(
            "mlp", [place], registry, ActionSpec(("r2c0",), ("odd",))
        ).parameters()
