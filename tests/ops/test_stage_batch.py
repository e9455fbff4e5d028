"""Staging: bit-equal to its twin for any batch size, order and number of threads.

Tests that take ``device`` run on the CPU here; tests/cuda runs them with the CUDA kernels, too.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from esper.ops.stage_batch import normalisation_table, stage_images, stage_tokens
from tests.cuda.cases import with_sanitizer
from tests.emulation.device import KernelDevice
from tests.ops.stage_batch_twin import philox, stage_images_twin

DTYPES = (torch.float32, torch.bfloat16)


def dataset(
    n: int, height: int, width: int, channels: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Random images and a table for them."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(
        0, 256, (n, height, width, channels), dtype=torch.uint8, generator=generator
    )
    spread = [0.2 + 0.01 * c for c in range(channels)]
    return images, normalisation_table(
        [0.4 + 0.02 * c for c in range(channels)], spread
    )


def channels_last(
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    on: KernelDevice | None = None,
) -> Tensor:
    empty = torch.empty(shape, dtype=dtype, memory_format=torch.channels_last)
    return empty.to(on.torch) if on else empty


# --- random numbers -----------------------------------------------------------------------------------------------


def test_the_twins_generator_gives_the_published_numbers() -> None:
    # Known answers that the authors publish with their code (Random123, kat_vectors).
    full = 0xFFFFFFFF
    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox([full] * 4, [full] * 2) == [
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    ]
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    assert philox(pi, [0xA4093822, 0x299F31D0]) == [
        0xD16CFE09,
        0x94FDCCEB,
        0x5001E420,
        0x24126EA1,
    ]


def test_draws_are_even() -> None:
    # 16,200 samples in 9 x 9 places: 200 of each expected, standard deviation 14; half of them mirrored, deviation 64.
    n, padding = 16_200, 4
    table = torch.arange(256.0).reshape(1, 256)
    marked = torch.zeros(n, 9, 9, 1, dtype=torch.uint8)
    marked[:, 4, 4] = 1
    places = stage_images(marked, torch.arange(n), table, padding=padding)[0].sum(
        dim=0
    )  # [1, 9, 9]
    assert places.sum() == n
    assert places.min() > 200 - 5 * 14
    assert places.max() < 200 + 5 * 14
    pair = (
        torch.tensor([1, 0], dtype=torch.uint8)
        .expand(n, 1, 2)
        .reshape(n, 1, 2, 1)
        .contiguous()
    )
    mirrored = stage_images(pair, torch.arange(n), table, flip=True)[0][
        :, 0, 0, 1
    ].sum()
    assert abs(int(mirrored) - n // 2) < 5 * 64


@pytest.mark.parametrize("what", ["seed", "epoch", "index"])
def test_every_key_changes_the_draw(what: str) -> None:
    images, table = dataset(1, 12, 12, 1)
    images = images.expand(40, 12, 12, 1).contiguous()
    outputs = []
    for value in range(40):
        options = {"seed": 5, "epoch": 3, "padding": 4, "flip": True}
        if what != "index":
            options[what] = value
        index = torch.tensor([value if what == "index" else 0])
        outputs.append(stage_images(images, index, table, **options)[0])  # type: ignore[arg-type]
    assert (
        len({tuple(out.flatten().tolist()) for out in outputs}) > 25
    )  # of 162 placements


# --- images -------------------------------------------------------------------------------------------------------


IMAGES = (
    *((32, 32, 3), (8, 8, 1), (5, 7, 3), (3, 4, 4), (1, 1, 1), (6, 9, 2)),
    *((4, 4, 32), (224, 224, 3), (64, 64, 1)),
)
SANITIZED = (
    (torch.float32, (5, 7, 3), 4, True),
    (torch.bfloat16, (3, 4, 4), 4, True),
    (torch.float32, (1, 1, 1), 0, False),
    (torch.bfloat16, (4, 4, 32), 4, True),
)


def pairwise() -> list[tuple[torch.dtype, tuple[int, int, int], int, bool]]:
    """Each size with both types; with and without padding, and mirrored or not."""
    cases = list(SANITIZED)
    for place, size in enumerate(IMAGES):
        for number, dtype in enumerate(DTYPES):
            padding = (0, 4, 1)[(place + number) % 3]
            cases.append((dtype, size, padding, (place + number) % 2 == 0))
    return list(dict.fromkeys(cases))


@pytest.mark.parametrize(
    ("dtype", "size", "padding", "flip"), with_sanitizer(pairwise(), SANITIZED)
)
def test_equals_the_twin(
    device: KernelDevice,
    dtype: torch.dtype,
    size: tuple[int, int, int],
    padding: int,
    flip: bool,
) -> None:
    number = 20 if size[0] < 100 else 3
    images, table = dataset(number, *size)
    indices = torch.randperm(number)
    height, width, channels = size
    out = channels_last((number, channels, height, width), dtype, device)
    moved = [part.to(device.torch) for part in (images, indices, table)]
    for seed, epoch in ((0, 0), (7, 3), (-1, 2**40), (2**63 - 1, -5)):
        options = {"seed": seed, "epoch": epoch, "padding": padding, "flip": flip}
        returned, _ = stage_images(*moved, out=out, **options)  # type: ignore[arg-type]
        assert returned is out
        chosen = indices.tolist()
        twin = stage_images_twin(images, chosen, table, dtype=dtype, **options)  # type: ignore[arg-type]
        assert torch.equal(out.cpu(), twin)
        assert out.is_contiguous(memory_format=torch.channels_last)


def test_known_pixels() -> None:
    # Without augmentation pixel v of channel c is (v / 255 - mean_c) / std_c.
    images = torch.tensor([0, 51, 255, 102], dtype=torch.uint8).reshape(1, 1, 2, 2)
    table = normalisation_table([0.5, 0.2], [0.5, 0.1])
    out, targets = stage_images(images, torch.tensor([0]), table)
    assert out.shape == (1, 2, 1, 2)
    assert out.flatten().tolist() == pytest.approx([-1.0, 1.0, 0.0, 2.0], abs=1e-6)
    assert targets is None


def test_padding_is_pixel_value_zero_before_normalising() -> None:
    images = torch.full((1, 4, 4, 1), 200, dtype=torch.uint8)
    table = normalisation_table([0.5], [0.25])
    out, _ = stage_images(
        images, torch.tensor([0]).repeat(1), table, padding=50, seed=3
    )
    assert set(out.flatten().tolist()) <= {table[0, 0].item(), table[0, 200].item()}
    assert table[0, 0] == -2.0
    assert (out == -2.0).any()


def test_the_batch_does_not_depend_on_who_makes_it() -> None:
    images, table = dataset(30, 32, 32, 3)
    indices = torch.randperm(30)
    options = {"seed": 11, "epoch": 4, "padding": 4, "flip": True}
    whole, _ = stage_images(images, indices, table, **options)  # type: ignore[arg-type]
    for first in range(0, 30, 7):
        size = min(7, 30 - first)
        out = channels_last((size, 3, 32, 32))
        stage_images(images, indices, table, first=first, out=out, **options)  # type: ignore[arg-type]
        assert torch.equal(out, whole[first : first + size])
    reverse, _ = stage_images(images, indices.flip(0), table, **options)  # type: ignore[arg-type]
    assert torch.equal(reverse.flip(0), whole)


def test_targets_come_along() -> None:
    images, table = dataset(10, 4, 4, 1)
    targets = torch.arange(100, 110)
    indices = torch.tensor([3, 3, 9, 0, 1])
    _, gathered = stage_images(images, indices, table, targets=targets)
    assert gathered is not None
    assert gathered.tolist() == [103, 103, 109, 100, 101]
    targets_out = torch.zeros(2, dtype=torch.int64)
    _, returned = stage_images(
        images,
        indices,
        table,
        first=2,
        targets=targets,
        out=channels_last((2, 1, 4, 4)),
        targets_out=targets_out,
    )
    assert returned is targets_out
    assert targets_out.tolist() == [109, 100]


def test_the_cursor_takes_the_place_of_epoch_and_first() -> None:
    images, table = dataset(20, 8, 8, 3)
    indices = torch.randperm(20)
    cursor = torch.tensor([6, 4])
    moving, fixed = channels_last((5, 3, 8, 8)), channels_last((5, 3, 8, 8))
    for _ in range(3):
        stage_images(
            images,
            indices,
            table,
            padding=2,
            flip=True,
            cursor=cursor,
            epoch=99,
            first=99,
            out=moving,
        )
        stage_images(
            images,
            indices,
            table,
            padding=2,
            flip=True,
            epoch=6,
            first=int(cursor[1]),
            out=fixed,
        )
        assert torch.equal(moving, fixed)
        cursor[1] += 5
    with pytest.raises(
        RuntimeError, match="a batch of 5 from position 19 is outside the 20 indices"
    ):
        stage_images(images, indices, table, cursor=cursor, out=moving)


@pytest.mark.sanitizer
def test_an_empty_batch(device: KernelDevice) -> None:
    images, table = (part.to(device.torch) for part in dataset(3, 4, 4, 1))
    nothing = torch.empty(0, dtype=torch.int64, device=device.torch)
    every = torch.arange(3, device=device.torch)
    out, targets = stage_images(images, nothing, table, targets=every)
    assert out.shape == (0, 1, 4, 4)
    assert targets is not None
    assert targets.shape == (0,)
    assert stage_tokens(every.expand(4, 3), nothing)[0].shape == (0, 2)


def test_bfloat16_is_rounded_as_torch_rounds() -> None:
    images = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16, 1)
    table = torch.randn(1, 256, generator=torch.Generator().manual_seed(0))
    table[0, :4] = torch.tensor([float("nan"), float("inf"), 1e-45, 3.3895e38])
    out = channels_last((1, 1, 16, 16), torch.bfloat16)
    stage_images(images, torch.tensor([0]), table, out=out)
    torch.testing.assert_close(
        out.flatten(), table[0].bfloat16(), rtol=0, atol=0, equal_nan=True
    )


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_same_bits_for_any_number_of_threads() -> None:
    images, table = dataset(300, 32, 32, 3)
    indices = torch.randperm(300)
    torch.set_num_threads(1)
    alone, _ = stage_images(images, indices, table, padding=4, flip=True)
    for count in (2, 3, 8):
        torch.set_num_threads(count)
        many, _ = stage_images(images, indices, table, padding=4, flip=True)
        assert torch.equal(alone, many)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"images": torch.zeros(5, 4, 4, 3)},
            r"images must be contiguous uint8 \[N, H, W, C\], got shape \[5, 4, 4, 3\]",
        ),
        (
            {"images": torch.zeros(5, 3, 4, 40, dtype=torch.uint8)},
            "images must have 1 to 32 channels",
        ),
        (
            {"images": torch.zeros(5, 0, 4, 3, dtype=torch.uint8)},
            "images of 0 x 4 are too small or too large",
        ),
        ({"indices": torch.zeros(2)}, "indices must be a contiguous int64 vector"),
        ({"indices": torch.tensor([0, 5])}, r"index 5 at position 1 is outside 0\.\.4"),
        (
            {"indices": torch.tensor([0])},
            "a batch of 2 from position 0 is outside the 1 indices",
        ),
        ({"first": 1}, "a batch of 2 from position 1 is outside the 2 indices"),
        (
            {"table": torch.zeros(1, 256)},
            r"table must be contiguous float32 \[3, 256\], got \[1, 256\]",
        ),
        ({"padding": -1}, "padding must be 0 to 1048576, got -1"),
        (
            {"targets": torch.zeros(5, dtype=torch.int64)},
            "targets and targets_out go together",
        ),
        (
            {
                "targets": torch.zeros(4, dtype=torch.int64),
                "targets_out": torch.zeros(2, dtype=torch.int64),
            },
            "targets must hold 5 values, got 4",
        ),
        (
            {"cursor": torch.zeros(3, dtype=torch.int64)},
            r"cursor \(epoch, first\) must hold 2 values, got 3",
        ),
        (
            {"out": torch.zeros(2, 3, 4, 4)},
            "out must be in channels_last memory format",
        ),
        (
            {"out": channels_last((2, 3, 4, 5))},
            r"out must be \[B, 3, 4, 4\] for these images, got \[2, 3, 4, 5\]",
        ),
    ],
)
def test_wrong_arguments(changes: dict[str, Tensor | int], message: str) -> None:
    images, table = dataset(5, 4, 4, 3)
    out = channels_last((2, 3, 4, 4)).fill_(7.0)
    arguments = {
        "images": images,
        "indices": torch.tensor([0, 1]),
        "table": table,
        "out": out,
    } | changes
    with pytest.raises(RuntimeError, match=f"^stage_images: {message}"):
        stage_images(**arguments)  # type: ignore[arg-type]
    assert (out == 7.0).all()


def test_wrong_tables() -> None:
    for arguments in (
        ([], []),
        ([0.5], [0.1, 0.2]),
        ([0.5], [0.0]),
        ([0.5], [1.0], -1.0),
    ):
        with pytest.raises(
            ValueError, match="a normalisation table needs one mean and one std"
        ):
            normalisation_table(*arguments)  # type: ignore[arg-type]


# --- tokens -------------------------------------------------------------------------------------------------------

TOKEN_DTYPES = (torch.int64, torch.int32, torch.uint16, torch.uint8)


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", TOKEN_DTYPES)
def test_rows_of_tokens_and_the_tokens_that_follow(
    device: KernelDevice, dtype: torch.dtype
) -> None:
    largest = 255 if dtype == torch.uint8 else 50_000
    tokens = torch.randint(0, largest + 1, (12, 1025))
    tokens[3] = largest
    indices = torch.randint(0, 12, (40,))
    moved = tokens.to(device.torch, dtype), indices.to(device.torch)
    out, targets = stage_tokens(*moved)
    assert out.dtype == torch.int64
    assert targets is not None
    assert torch.equal(out.cpu(), tokens[indices, :-1])
    assert torch.equal(targets.cpu(), tokens[indices, 1:])


@pytest.mark.parametrize("dtype", TOKEN_DTYPES)
def test_a_text_is_read_through_a_view(dtype: torch.dtype) -> None:
    text = torch.arange(100).to(dtype)
    rows = (
        text.view(torch.int16).unfold(0, 9, 8).view(torch.uint16)
        if dtype == torch.uint16
        else text.unfold(0, 9, 8)
    )
    out, targets = stage_tokens(rows, torch.tensor([0, 1, 11]))
    assert out.tolist() == [list(range(start, start + 8)) for start in (0, 8, 88)]
    assert targets is not None
    assert torch.equal(targets, out + 1)


def test_whole_rows_first_and_cursor() -> None:
    tokens = torch.arange(40).reshape(8, 5)
    indices = torch.arange(8)
    out = torch.zeros(3, 5, dtype=torch.int64)
    for options in ({"first": 2}, {"cursor": torch.tensor([9, 2])}):
        out.zero_()
        returned, targets = stage_tokens(tokens, indices, out=out, **options)  # type: ignore[arg-type]
        assert returned is out
        assert targets is None
        assert torch.equal(out, tokens[2:5])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": torch.zeros(4, 5)}, "tokens must be int64, int32, uint16 or uint8"),
        (
            {"tokens": torch.zeros(5, 4, dtype=torch.int64).t()},
            "with the tokens of a row side by side",
        ),
        ({"indices": torch.tensor([0, 4])}, r"index 4 at position 1 is outside 0\.\.3"),
        ({"first": 1}, "a batch of 2 from position 1 is outside the 2 indices"),
        (
            {"out": torch.zeros(2, 5, dtype=torch.int64)},
            r"out must be contiguous int64 \[B, 4\]",
        ),
        (
            {"targets_out": torch.zeros(3, 4, dtype=torch.int64)},
            r"targets_out must be contiguous int64 \[B, 4\]",
        ),
    ],
)
def test_wrong_token_arguments(changes: dict[str, Tensor | int], message: str) -> None:
    arguments = {
        "tokens": torch.zeros(4, 5, dtype=torch.int64),
        "indices": torch.tensor([0, 1]),
        "out": torch.zeros(2, 4, dtype=torch.int64),
        "targets_out": torch.zeros(2, 4, dtype=torch.int64),
    } | changes
    with pytest.raises(RuntimeError, match=f"^stage_tokens: .*{message}"):
        stage_tokens(**arguments)  # type: ignore[arg-type]


# --- what torch asks of an operator -------------------------------------------------------------------------------
