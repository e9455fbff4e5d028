"""The convolutional host: conv → BatchNorm → ReLU → optional pool, channels doubling, then a linear head."""

from __future__ import annotations

from torch import nn

from esper.hosts.host import SegmentedHost
from esper.seeds.slot import SlotSite


class CNNHost(SegmentedHost):
    """``blocks`` convolution blocks with a slot before the pool of each (row 0) and, with ``rows=2``, after it (row 1).

    Args:
        in_channels: channels of the images [B, in_channels, H, W].
        classes: size of the logits [B, classes].
        base: channels of the first block; each later block doubles them.
        blocks: number of blocks.
        kernel: side of the square convolution kernels, odd.
        pool: whether blocks end in a 2×2 max-pool.
        pool_last: whether the last one does, too, before the global average.
        rows: 1 or 2; a second row needs the pool, without which both rows would see the same features.
    """

    def __init__(
        self,
        in_channels: int,
        classes: int,
        base: int,
        blocks: int,
        kernel: int = 3,
        pool: bool = True,
        pool_last: bool = True,
        rows: int = 2,
    ) -> None:
        if rows not in (1, 2) or (rows == 2 and not pool):
            raise ValueError(f"rows is 1, or 2 with pool; not rows={rows}, pool={pool}")
        segments: list[nn.Module] = []
        sites: list[SlotSite] = []
        before: list[nn.Module] = []  # layers since the last slot
        channels = in_channels
        for block in range(blocks):
            width = base * 2**block
            convolution = nn.Conv2d(channels, width, kernel, padding=kernel // 2, bias=False)
            segments.append(nn.Sequential(*before, convolution, nn.BatchNorm2d(width), nn.ReLU()))
            sites.append(SlotSite(f"r0c{block}", width))
            pools = pool and (pool_last or block < blocks - 1)
            before = [nn.MaxPool2d(2)] if pools else []
            if pools and rows == 2:
                segments.append(nn.Sequential(*before))
                sites.append(SlotSite(f"r1c{block}", width))
                before = []
            channels = width
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
        segments.append(nn.Sequential(*before, *head))
        super().__init__(segments, sites, topology="cnn")
