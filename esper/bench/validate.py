"""Cases of `validate`: every configuration of a host with blended seeds, against one forward pass of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from esper.attribution.counterfactual import CounterfactualHelper
from esper.bench.request import BenchArgs, Size, SizeForm
from esper.bench.runner import BenchCase
from esper.bench.synthetic import VALIDATION, growth_env, image_task
from esper.lifecycle.ramps import STYLES
from esper.rollout.threads import one_thread
from esper.seeds.blueprints import BLUEPRINTS
from esper.seeds.site import Role
from esper.training.host_training import HostTraining
from esper.training.validate import evaluate

NAME = "validate"
SIZE = SizeForm(("samples", "width"), f"{VALIDATION}x8")

DEFAULT_SIZES: tuple[Size, ...] = ((VALIDATION, 8), (VALIDATION, 32))
BLENDED = ("r0c0", "r0c1", "r0c2")
"""One slot in each block; the first configurations diverge right after the first block."""
BLUEPRINT = "conv_light"
_BAR = 0.25  # the tree costs at most four forward passes
_BAR_SIZE = (VALIDATION, 8)
_QUICK = 100


def blend(training: HostTraining) -> None:
    """Puts seeds in BLENDING into all ``BLENDED`` slots, halfway to full alpha."""
    for name in BLENDED:
        site = training.site_by_name[name]
        training.germinate(site, BLUEPRINTS.get("cnn", BLUEPRINT), STYLES["LINEAR_ADD"])
        site.assign(Role.BLENDED, alpha=0.5)


def comparisons(request: BenchArgs) -> Iterator[BenchCase]:
    """Yields the tree against one configuration, and against each configuration evaluated separately."""
    for device in request.devices:
        for samples, width in request.sizes or DEFAULT_SIZES:
            yield from _at(_QUICK if request.quick else samples, width, device)


def _at(samples: int, width: int, device: torch.device) -> Iterator[BenchCase]:
    task = image_task(64, width, device, validation=samples)
    with growth_env(task, envs=1, batch=32) as env, one_thread():
        host = env.training[0]
        blend(host)
        everything = CounterfactualHelper().plan(host.sites, costly=True)

        def ours() -> None:
            evaluate(host, task.validation, everything)

        def all_on() -> None:
            evaluate(host, task.validation, everything[:1])

        def each() -> None:
            for configuration in everything:
                evaluate(host, task.validation, [configuration])

        case = f"{NAME}: {len(everything)} configurations of 3 blended seeds"
        size = f"{samples:,} samples, width {width}, {', '.join(BLENDED)}"
        bar = _BAR if (samples, width) == _BAR_SIZE and device.type == "cpu" else None
        for baseline, other, least in (
            ("one forward, all on (bar: at most 4 times)", all_on, bar),
            ("each configuration by itself", each, None),
        ):
            yield BenchCase(case, size, device, baseline, ours, other, least)
