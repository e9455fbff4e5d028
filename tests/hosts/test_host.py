"""The host interface: segments, and names of slots."""

import pytest
import torch

from esper.hosts.host import SegmentedHost
from esper.seeds.site import SlotSite


def test_a_host_needs_one_segment_more_than_sites() -> None:
    with pytest.raises(ValueError, match="2 segments"):
        SegmentedHost([torch.nn.Identity()], [SlotSite("r0c0", 1)], "cnn")


@pytest.mark.finding("M10")
def test_slot_names_are_checked_in_one_place_and_doubles_are_refused() -> None:
    segments = [torch.nn.Identity() for _ in range(3)]
    with pytest.raises(ValueError, match="two sites have the slot name r0c0"):
        SegmentedHost(segments, [SlotSite("r0c0", 1), SlotSite("r0c0", 1)], "cnn")
    with pytest.raises(ValueError, match="'first' is not of the form r0c0"):
        SegmentedHost(segments, [SlotSite("r0c0", 1), SlotSite("first", 1)], "cnn")
