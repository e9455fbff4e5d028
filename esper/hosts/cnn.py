"""The convolutional host: conv → BatchNorm → ReLU → optional pool, channels doubling, then a linear head."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor, nn

from esper.hosts.host import SegmentedHost, SiteHook
from esper.ops import NormReluPool
from esper.seeds.site import SlotSite

FUSED_CHANNELS = 8
"""Vector width, in channels, of the fused BatchNorm, ReLU and pool; hosts with fewer channels are faster without it."""


class CNNHost(SegmentedHost):
    """Convolution blocks with a slot before the pool of each (row 0) and, with ``rows=2``, after it (row 1).

    If ``base`` is a multiple of 8, the host computes in channels_last, with BatchNorm, ReLU and pool as one operator.

    Args:
        in_channels: channels of the images [B, in_channels, H, W].
        classes: size of the logits [B, classes].
        base: channels of the first block; each later block doubles them.
        blocks: number of blocks.
        kernel: side of the square convolution kernels, odd.
        pool: whether blocks end in a 2×2 max-pool.
        pool_last: whether the last block does, too, before the global average.
        rows: 1 or 2; two rows need the pool, without which both rows would see the same features.

    Raises ValueError for other ``rows``.
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
            raise ValueError(f"rows must be 1, or 2 with pool; not rows={rows}, pool={pool}")
        fused = base % FUSED_CHANNELS == 0
        segments: list[nn.Module] = []
        sites: list[SlotSite] = []
        fusable: set[int] = set()  # sites between an operator that can pool and a pool
        before: list[nn.Module] = []  # layers since the last slot
        channels = in_channels
        for block in range(blocks):
            width = base * 2**block
            convolution = nn.Conv2d(channels, width, kernel, padding=kernel // 2, bias=False)
            norm = [NormReluPool(width)] if fused else [nn.BatchNorm2d(width), nn.ReLU()]
            segments.append(nn.Sequential(*before, convolution, *norm))
            sites.append(SlotSite(f"r0c{block}", width))
            pools = pool and (pool_last or block < blocks - 1)
            before = [nn.MaxPool2d(2)] if pools else []
            if fused and pools:
                fusable.add(len(sites) - 1)
            if pools and rows == 2:
                segments.append(nn.Sequential(*before))
                sites.append(SlotSite(f"r1c{block}", width))
                before = []
            channels = width
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
        segments.append(nn.Sequential(*before, *head))
        super().__init__(segments, sites, topology="cnn")
        self._fusable = fusable
        self.width = base
        self.of_width = partial(
            CNNHost, in_channels, classes, blocks=blocks, kernel=kernel, pool=pool, pool_last=pool_last, rows=rows
        )
        """Makes a host like this one with another ``base``."""
        if fused:
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def _from(self, start: int, h: Tensor, hook: SiteHook, vacant: Collection[int]) -> Tensor:
        """Runs the segments from ``start`` on; a pool after a vacant site is fused with the operators before the site.

        Fusion gives bit-identical results. Compiled segments are not fused, since each is compiled as a whole.
        """
        pooled = False  # whether the first layer of the segment, a pool, has already run
        for number in range(start, len(self.segments)):
            segment = self.segments[number]
            fuses = number in vacant and number in self._fusable and self.compiled is None
            if pooled or fuses:
                layers = list(segment.children())
                for layer in layers[pooled:]:
                    h = layer(h, pool=True) if fuses and layer is layers[-1] else layer(h)
            else:
                h = self.run(segment, h)
            pooled = fuses
            if number < len(self.sites) and not fuses:
                h = hook(number, h)
        return h
