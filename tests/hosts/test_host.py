"""The host interface: segments, and names of slots."""

from __future__ import annotations

import pytest
import torch

from esper.core.place import Place
from esper.hosts.host import SegmentedHost, kept_modes


def test_a_host_needs_one_segment_more_than_sites() -> None:
    with pytest.raises(ValueError, match="2 segments"):
        SegmentedHost([torch.nn.Identity()], [Place("r0c0", 1)], "cnn")


@pytest.mark.finding("M10")
def test_slot_names_are_checked_in_one_place_and_doubles_are_refused() -> None:
    segments = [torch.nn.Identity() for _ in range(3)]
    with pytest.raises(ValueError, match="two sites have the slot name r0c0"):
        SegmentedHost(segments, [Place("r0c0", 1), Place("r0c0", 1)], "cnn")
    with pytest.raises(ValueError, match="'first' is not of the form r0c0"):
        SegmentedHost(segments, [Place("r0c0", 1), Place("first", 1)], "cnn")


class Merging(torch.nn.Linear):
    """A layer with a `train` of its own, which merges its low-rank part into the weight for evaluation."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.merged = False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        self.merged = not mode
        return self


def test_modes_are_restored_by_layers_with_a_train_of_their_own() -> None:
    network = torch.nn.Sequential(Merging(), torch.nn.Dropout())
    network[1].eval()  # a user may freeze a part
    with kept_modes(network):
        network.eval()
        assert network[0].merged
    assert not network[0].merged
    assert [module.training for module in network.modules()] == [True, True, False]


def test_modes_are_restored_after_an_error() -> None:
    network = Merging()

    def fail() -> None:
        with kept_modes(network):
            network.eval()
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        fail()
    assert (network.training, network.merged) == (True, False)
