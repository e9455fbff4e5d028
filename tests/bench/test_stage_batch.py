"""Both sides of the case `stage-batch`."""

from __future__ import annotations

import torch

from esper.bench.stage_batch import MEAN, STD, torchvision_pipeline
from esper.ops.stage_batch import normalisation_table, stage_images


def test_both_sides_normalise_images_alike() -> None:
    # Random draws differ between the two, so only the steps after them are compared.
    images = torch.randint(
        0,
        256,
        (4, 8, 8, 3),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(0),
    )
    own, _ = stage_images(images, torch.arange(4), normalisation_table(MEAN, STD))
    cast, normalise = torchvision_pipeline(8).transforms[2:]
    torch.testing.assert_close(
        own, normalise(cast(images.permute(0, 3, 1, 2))), rtol=1e-5, atol=1e-6
    )
