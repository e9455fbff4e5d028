"""Make a batch from a dataset on the device: gather, crop, mirror, normalise, cast and lay out in one pass."""

from collections.abc import Sequence

import torch
from torch import Tensor

from esper.ops import _native

assert _native  # loading it registers the operators

_library = torch.library.Library("esper", "IMPL")  # type: ignore[no-untyped-call]
for _name in ("stage_images", "stage_tokens"):
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]

_images = torch.ops.esper.stage_images.default
_tokens = torch.ops.esper.stage_tokens.default


def normalisation_table(
    mean: Sequence[float], std: Sequence[float], scale: float = 255.0, device: torch.device | str = "cpu"
) -> Tensor:
    """Return float32 ``[C, 256]``: ``(v / scale - mean_c) / std_c`` for each channel c and pixel value v.

    It is computed in float64 and rounded once. As everything else about staging is done in integers, CPU and CUDA make
    the same bits from it.

    Args:
        mean: mean of each channel, in units of ``scale``.
        std: standard deviation of each channel, likewise; above 0.
        scale: pixel value that means 1.
        device: where the dataset lies.

    Raises:
        ValueError: no channel, as many means as deviations are not given, or a deviation or scale that is not positive.
    """
    if not mean or len(mean) != len(std) or min(std) <= 0 or scale <= 0:
        raise ValueError(
            "a normalisation table needs one mean and one std above 0 for each channel, and a scale above 0; "
            f"got mean {list(mean)}, std {list(std)}, scale {scale}"
        )
    values = torch.arange(256, dtype=torch.float64) / scale
    columns = [torch.tensor(numbers, dtype=torch.float64)[:, None] for numbers in (mean, std)]
    return ((values - columns[0]) / columns[1]).float().to(device)


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
    """Make a batch of images: sample b is ``images[indices[first + b]]``, augmented and normalised.

    With ``padding`` p, a window of the image's size is cut from the image with p pixels of value 0 on every side, at a
    place drawn evenly from the (2p + 1)²; then, with ``flip``, it is mirrored left to right with probability 1/2. Pixel
    v of channel c becomes ``table[c, v]``; so padding is pixel value 0 before normalising, as in torchvision's
    ``RandomCrop`` before ``Normalize``.

    What is drawn depends on (``seed``, ``epoch``, index of the sample) alone, by the counter-based generator
    Philox4x32-10 (Salmon et al., SC 2011): the same for any batch size, order, thread or device.

    Images have their channels last in the dataset, as image files and torchvision's datasets do: then a row of the
    image becomes a row of the channels_last batch, read and written in order.

    Args:
        images: uint8 ``[N, H, W, C]``, contiguous, 1 to 32 channels.
        indices: int64 ``[n]``, contiguous: a permutation of an epoch, or any choice of samples.
        table: float32 ``[C, 256]``, see :func:`normalisation_table`.
        seed: of the run and env; any 64-bit number.
        epoch: another draw each epoch.
        padding: p above; 0 crops nothing.
        flip: whether mirrored images mean the same; not so for digits.
        first: place in ``indices`` of the batch's first sample.
        cursor: int64 ``[2]``, (epoch, first), on the dataset's device; it takes the place of both arguments, so that a
            captured CUDA graph can move on.
        targets: int64 ``[N]``, gathered too.
        out: float32 or bfloat16 ``[B, C, H, W]`` in channels_last memory format, overwritten; its size is the batch's.
            Without it float32 is made for all indices from ``first`` on.
        targets_out: int64 ``[B]``, overwritten; made if needed when ``out`` is.

    Returns:
        ``out`` and ``targets_out``.

    Raises:
        RuntimeError: other dtypes, shapes or devices, a batch that runs past ``indices``; on the CPU also an index or
            cursor outside the data. On CUDA that would need a sync: there the image is NaN and its target -1.
    """
    if out is None:
        height, width, channels = images.shape[1:4] if images.dim() == 4 else (0, 0, 0)  # refused by the operator
        shape = (max(indices.numel() - first, 0), channels, height, width)
        out = torch.empty(shape, device=images.device, memory_format=torch.channels_last)
        if targets is not None and targets_out is None:
            targets_out = torch.empty(shape[:1], dtype=torch.int64, device=images.device)
    _images(images, indices, table, targets, seed, epoch, first, cursor, padding, flip, out, targets_out)
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
    """Make a batch of sequences and of the tokens that follow: rows ``tokens[indices[first + b]]`` as int64.

    A row of L = T + 1 tokens gives ``out`` its first T and ``targets_out`` its last T. A text of any length needs no
    rows of its own: ``text.unfold(0, T + 1, T)`` is a view of it as rows that overlap by one token.

    Args:
        tokens: int64, int32, uint16 or uint8 ``[N, T + 1]``; rows may overlap, the tokens of a row lie side by side.
        indices: int64 ``[n]``, contiguous.
        first: place in ``indices`` of the batch's first row.
        cursor: int64 ``[2]``, (epoch, first), on the dataset's device, in place of ``first``; the epoch is not used.
        out: int64 ``[B, T]``, contiguous, overwritten; without it, made for all indices from ``first`` on.
        targets_out: int64 ``[B, T]``, contiguous, overwritten; made when ``out`` is. With ``out`` alone, ``out`` is
            ``[B, L]`` and takes whole rows.

    Returns:
        ``out`` and ``targets_out``.

    Raises:
        RuntimeError: as :func:`stage_images`; on CUDA a row that is not there gives tokens -1.
    """
    if out is None:
        shape = (max(indices.numel() - first, 0), max(tokens.shape[-1] - 1, 0))
        out = torch.empty(shape, dtype=torch.int64, device=tokens.device)
        targets_out = torch.empty_like(out)
    _tokens(tokens, indices, first, cursor, out, targets_out)
    return out, targets_out


@torch.library.register_fake("esper::stage_images")  # type: ignore[untyped-decorator]
def _fake_images(
    images: Tensor,
    indices: Tensor,
    table: Tensor,
    targets: Tensor | None,
    seed: int,
    epoch: int,
    first: int,
    cursor: Tensor | None,
    padding: int,
    flip: bool,
    out: Tensor,
    targets_out: Tensor | None,
) -> None:
    return None


@torch.library.register_fake("esper::stage_tokens")  # type: ignore[untyped-decorator]
def _fake_tokens(
    tokens: Tensor, indices: Tensor, first: int, cursor: Tensor | None, out: Tensor, targets_out: Tensor | None
) -> None:
    return None
