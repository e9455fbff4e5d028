"""The convolutional host: conv → BatchNorm → ReLU → optional pool, channels doubling, then a linear head."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from esper.core.blueprints.source import width_of
from esper.core.place import Place
from esper.hosts.host import SegmentedHost, SiteSpan, Step, row_major
from esper.ops.norm_relu_pool import NormReluPool

FUSED_CHANNELS = 8
"""Vector width, in channels, of the fused BatchNorm, ReLU and pool; hosts with fewer channels are faster without it."""


class CNNHost(SegmentedHost):
    """Convolution blocks with a slot before the pool of each (row 0), and after it (row 1).

    The slots of row 2 read what comes into a block and add to what the convolution of the next one returns, or to the
    logits, so that their seeds are more channels inside the block. ``rows`` chooses the slots that the host has at
    first, and :meth:`use_slots` any others. If ``base`` is a multiple of 8, the host computes in channels_last, with
    BatchNorm, ReLU and pool as one operator.

    Args:
        in_channels: channels of the images [B, in_channels, H, W].
        classes: size of the logits [B, classes].
        base: channels of the first block; each later block doubles them.
        blocks: number of blocks.
        kernel: side of the square convolution kernels, odd.
        pool: whether blocks end in a 2×2 max-pool.
        pool_last: whether the last block does, too, before the global average.
        rows: 1 or 2; two rows need the pool, without which both rows would see the same features.
        widths: channels of each block, in place of ``base`` and its doublings.

    Raises ValueError for other ``rows``, or for another number of widths than blocks.
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
        widths: Sequence[int] | None = None,
    ) -> None:
        if rows not in (1, 2) or (rows == 2 and not pool):
            raise ValueError(f"rows must be 1, or 2 with pool; not rows={rows}, pool={pool}")
        if widths is None:
            widths = [base * 2**block for block in range(blocks)]
        if len(widths) != blocks:
            raise ValueError(f"widths are {list(widths)}; expected one for each of {blocks} blocks")
        fused = all(width % FUSED_CHANNELS == 0 for width in widths)
        layers: list[nn.Module] = []
        sites: dict[str, SiteSpan] = {}  # joints of layers
        inside: list[int] = []  # joints before the convolutions
        channels = in_channels
        for block, width in enumerate(widths):
            inside.append(len(layers))
            layers.append(nn.Conv2d(channels, width, kernel, padding=kernel // 2, bias=False))
            if block:
                sites[f"r2c{block - 1}"] = SiteSpan(inside[-2], len(layers))
            if fused:
                layers.append(NormReluPool(width))
            else:
                layers += [nn.BatchNorm2d(width), nn.ReLU()]
            sites[f"r0c{block}"] = SiteSpan(len(layers), len(layers))
            if pool and (pool_last or block < blocks - 1):
                layers.append(nn.MaxPool2d(2))
                sites[f"r1c{block}"] = SiteSpan(len(layers), len(layers))
            channels = width
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
        sites[f"r2c{blocks - 1}"] = SiteSpan(inside[-1], len(layers))
        cuts = [0]
        places = []
        for name, span in sites.items():
            row = int(name[1])
            if row < rows:
                cuts.append(span.sink)
                places.append(Place(name, _width_at(layers, span.sink)))
        cuts.append(len(layers))
        segments = [nn.Sequential(*layers[a:b]) for a, b in pairwise(cuts)]
        super().__init__(segments, places, topology="cnn")
        self._possible = sites
        self._use_slots(set(self.slot_names))
        self.width = base
        self.of_width = partial(
            CNNHost,
            in_channels,
            classes,
            blocks=blocks,
            kernel=kernel,
            pool=pool,
            pool_last=pool_last,
            rows=rows,
        )
        """Makes a host like this one with another ``base``."""
        if fused:
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @property
    def possible_slots(self) -> tuple[str, ...]:
        return row_major(self._possible)

    def _use_slots(self, names: set[str]) -> None:
        chosen = {name: site for name, site in self._possible.items() if name in names}
        layers: list[nn.Module] = []
        known: dict[tuple[nn.Module, ...], nn.Module] = {}
        for segment in self.segments:
            children = tuple(segment.children())
            layers += children
            known[children] = segment
        joints = {0, len(layers)}
        for span in chosen.values():
            joints.update((span.source, span.sink))
        cuts = sorted(joints)
        parts = [tuple(layers[a:b]) for a, b in pairwise(cuts)]
        steps = [Step(known.get(part) or nn.Sequential(*_with_pools(part))) for part in parts]
        places = []
        spans = []
        for name, span in sorted(chosen.items(), key=lambda item: item[1].sink):
            between = layers[span.source : span.sink]
            width = _width_at(layers, span.sink)
            places.append(Place(name, width, has_source=bool(between), layers=tuple(between)))
            spans.append(SiteSpan(cuts.index(span.source), cuts.index(span.sink)))
        self._lay_out(steps, places, spans)
        self._fusable = set()
        for number, (before, after) in enumerate(pairwise(parts)):
            if isinstance(before[-1], NormReluPool) and isinstance(after[0], nn.MaxPool2d):
                self._fusable.add(number)

    def _step(
        self,
        number: int,
        h: Tensor,
        fused: bool,
        free: bool,
    ) -> tuple[Tensor, bool]:
        """Runs a step; a pool behind a joint where nothing happens is fused with the operators before it.

        Fusion gives bit-identical results. Compiled steps are not fused, since each is compiled as a whole.
        """
        module = self.steps[number].module
        fuses = free and number in self._fusable and self.compiled is None
        if not (fused or fuses):
            return self.run(module, h), False
        layers = list(module.children())
        if fused:
            layers = layers[1:]  # a pool that has been fused has already run
        for layer in layers:
            if fuses and layer is layers[-1]:
                return layer(h, pool=True), True
            h = layer(h)
        return h, fuses


def _width_at(layers: Sequence[nn.Module], joint: int) -> int:
    """Returns the width of the features before layer ``joint``."""
    *_, last = (layer for layer in layers[:joint] if isinstance(layer, (nn.Conv2d, nn.Linear)))
    return width_of(last)


class Pooled(nn.Module):
    """A BatchNorm with ReLU, fused with the pool behind it."""

    def __init__(self, norm: NormReluPool) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, h: Tensor) -> Tensor:
        return self.norm(h, pool=True)  # type: ignore[no-any-return]


def _with_pools(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns the layers with each pool behind a fused BatchNorm as a part of it."""
    result: list[nn.Module] = []
    for layer in layers:
        if isinstance(layer, nn.MaxPool2d) and result and isinstance(result[-1], NormReluPool):
            result[-1] = Pooled(result[-1])
        else:
            result.append(layer)
    return result
