"""`stage_images` again, a sample at a time in Python integers and public PyTorch."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

MASK = 0xFFFFFFFF


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10 of Salmon et al. (SC 2011): four 32-bit words from a counter of four and a key of two."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (second >> 32) ^ c[1] ^ k[0],
            second & MASK,
            (first >> 32) ^ c[3] ^ k[1],
            first & MASK,
        ]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


def placement(
    seed: int, epoch: int, sample: int, padding: int, flip: bool
) -> tuple[int, int, bool]:
    """Random draws of a sample: offset of the window in rows and columns, and whether it is mirrored."""
    words = philox(
        [sample & MASK, sample >> 32 & MASK, epoch & MASK, epoch >> 32 & MASK],
        [seed & MASK, seed >> 32 & MASK],
    )
    down, right = ((word * (2 * padding + 1) >> 32) - padding for word in words[:2])
    return down, right, flip and words[2] >= 2**31


def stage_images_twin(
    images: Tensor,
    indices: Sequence[int],
    table: Tensor,
    seed: int = 0,
    epoch: int = 0,
    padding: int = 0,
    flip: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return ``[B, C, H, W]`` of ``dtype``."""
    batch = []
    for index in indices:
        down, right, mirrored = placement(seed, epoch, index, padding, flip)
        padded = F.pad(
            images[index].permute(2, 0, 1), [padding] * 4
        )  # [C, H + 2p, W + 2p]
        height, width = images.shape[1:3]
        window = padded[:, padding + down :, padding + right :][:, :height, :width]
        if mirrored:
            window = window.flip(2)
        batch.append(
            torch.stack([table[c][plane.long()] for c, plane in enumerate(window)])
        )
    if not batch:
        return torch.empty(0, images.shape[3], *images.shape[1:3], dtype=dtype)
    return torch.stack(batch).to(dtype)
