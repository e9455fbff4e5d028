"""Batches from a dataset on the device: gather, crop, mirror, normalise, cast and lay out in one pass."""

from collections.abc import Sequence

import torch
from torch import Tensor

from esper.ops import _native

_native.not_differentiable("stage_images", "stage_tokens", in_place=True)

_images = _native.writing(torch.ops.esper.stage_images.default)
_tokens = _native.writing(torch.ops.esper.stage_tokens.default)


def normalisation_table(
    mean: Sequence[float],
    std: Sequence[float],
    scale: float = 255.0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Returns float32 ``[C, 256]``: ``(v / scale - mean_c) / std_c`` for each channel c and pixel value v.

    It is computed in float64 and rounded once. All other steps of staging are integer operations, so CPU and CUDA
    batches are bit-identical.

    Args:
        mean, std: mean and standard deviation of each channel, in units of ``scale``; deviations are above 0.
        scale: pixel value that maps to 1 before normalising.
        device: device of the dataset.

    Raises:
        ValueError: no channels, different numbers of means and deviations, or a deviation or scale that is 0 or less.
    """
    if not mean or len(mean) != len(std) or min(std) <= 0 or scale <= 0:
        raise ValueError(
            "a normalisation table needs one mean and one std above 0 for each channel, and a scale above 0; "
            f"got mean {list(mean)}, std {list(std)}, scale {scale}"
        )
    values = torch.arange(256, dtype=torch.float64) / scale
    means = torch.tensor(mean, dtype=torch.float64)[:, None]
    stds = torch.tensor(std, dtype=torch.float64)[:, None]
    return ((values - means) / stds).float().to(device)


def stage_images(
    images: Tensor,
    indices: Tensor,
    table: Tensor,
    *,
    seed: int = 0,
    epoch: int = 0,
    padding: int = 0,
    flip: bool = False,
    first: int = 0,
    cursor: Tensor | None = None,
    targets: Tensor | None = None,
    out: Tensor | None = None,
    targets_out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Makes a batch of images: sample b is ``images[indices[first + b]]``, augmented and normalised.

    With ``padding`` p, a window of the image's size is cut out of the image padded with p zero pixels on every side, at
    one of (2p + 1)² equally likely places; then, with ``flip``, it is mirrored left to right with probability 1/2.
    Pixel v of channel c becomes ``table[c, v]``; so padding is pixel value 0 before normalising, as in torchvision's
    ``RandomCrop`` before ``Normalize``. Random draws depend only on (``seed``, ``epoch``, index of the sample), by the
    counter-based generator Philox4x32-10 (Salmon et al., SC 2011); they are the same for any batch size, order, thread
    or device. The dataset is channels-last, as image files are, so that it and the batch are accessed in order.

    Args:
        images: uint8 ``[N, H, W, C]``, contiguous, 1 to 32 channels.
        indices: int64 ``[n]``, contiguous: the permutation of an epoch, or any samples.
        table: float32 ``[C, 256]``, see :func:`normalisation_table`.
        seed: seed of the run and env; any 64-bit number.
        epoch: number of the epoch; draws differ between epochs.
        padding: p above; 0: no crop.
        flip: whether to mirror at random; only for images that keep their meaning, unlike digits.
        first: position in ``indices`` of the batch's first sample.
        cursor: int64 ``[2]``, (epoch, first), on the dataset's device; it replaces both arguments, so that a captured
            CUDA graph can advance.
        targets: int64 ``[N]``, gathered as well.
        out: float32 or bfloat16 ``[B, C, H, W]`` in channels_last memory format, overwritten; it sets the batch size.
            Without it, a float32 batch of all indices from ``first`` on is allocated.
        targets_out: int64 ``[B]``, overwritten; allocated together with ``out`` if ``targets`` are given.

    Returns:
        ``out`` and ``targets_out``.

    Raises:
        RuntimeError: other dtypes, shapes or devices, or a batch that runs past ``indices``; on the CPU also an index
            or cursor outside the data. Checking that on CUDA would need a sync: there the image is NaN, its target -1.
    """
    if out is None:
        height = width = channels = 0  # the operator refuses them
        if images.dim() == 4:
            height, width, channels = images.shape[1:]
        shape = (max(indices.numel() - first, 0), channels, height, width)
        out = torch.empty(shape, device=images.device, memory_format=torch.channels_last)
        if targets is not None and targets_out is None:
            targets_out = torch.empty(shape[:1], dtype=torch.int64, device=images.device)
    _images(
        images,
        indices,
        table,
        targets,
        seed,
        epoch,
        first,
        cursor,
        padding,
        flip,
        out,
        targets_out,
    )
    return out, targets_out


def stage_tokens(
    tokens: Tensor,
    indices: Tensor,
    *,
    first: int = 0,
    cursor: Tensor | None = None,
    out: Tensor | None = None,
    targets_out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Makes a batch of sequences and their next tokens from rows ``tokens[indices[first + b]]``, as int64.

    For a row of L = T + 1 tokens, ``out`` gets the first T and ``targets_out`` the last T. A text of any length can be
    used without a copy: ``text.unfold(0, T + 1, T)`` is a view of it as rows that overlap by one token.

    Args:
        tokens: int64, int32, uint16 or uint8 ``[N, T + 1]``; rows may overlap, the tokens of a row are adjacent.
        indices: int64 ``[n]``, contiguous.
        first: position in ``indices`` of the batch's first row.
        cursor: int64 ``[2]``, (epoch, first), on the dataset's device; it replaces ``first``, the epoch is not used.
        out: int64 ``[B, T]``, contiguous, overwritten; without it, allocated for all indices from ``first`` on.
        targets_out: int64 ``[B, T]``, contiguous, overwritten; allocated together with ``out``. If only ``out`` is
            given, it is ``[B, L]`` and gets whole rows.

    Returns:
        ``out`` and ``targets_out``.

    Raises:
        RuntimeError: as :func:`stage_images`; on CUDA an index outside the data gives tokens -1.
    """
    if out is None:
        shape = (max(indices.numel() - first, 0), max(tokens.shape[-1] - 1, 0))
        out = torch.empty(shape, dtype=torch.int64, device=tokens.device)
        targets_out = torch.empty_like(out)
    _tokens(tokens, indices, first, cursor, out, targets_out)
    return out, targets_out
