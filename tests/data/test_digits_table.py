"""The digits as a table, for hosts of the topology `mlp`."""

import torch

from esper.data.tasks import load_task
from esper.hosts.sizes import at_width
from tests.core_helpers import digits


def test_rows_are_the_pixels_of_the_same_splits() -> None:
    table, images = load_task("digits_table"), digits()
    for name in ("train", "validation", "test"):
        rows, pixels = getattr(table, name), getattr(images, name)
        assert torch.equal(rows.x, pixels.x.flatten(1))
        assert torch.equal(rows.y, pixels.y)


def test_the_host_is_an_mlp_with_a_slot_after_each_hidden_layer_in_any_width() -> None:
    task = load_task("digits_table")
    sizes = []
    for build in (task.build_host, at_width(task.build_host, 16)):
        host = build()
        host.probe(task.sample)
        assert (host.topology, host.slot_names) == ("mlp", ("r0c0", "r0c1"))
        sizes.append(host.parameter_count)
    assert sizes == [
        64 * 8 + 8 + 8 * 8 + 8 + 8 * 10 + 10,
        64 * 16 + 16 + 16 * 16 + 16 + 16 * 10 + 10,
    ]
    assert f"{sizes[0]:,} parameters" in task.description
