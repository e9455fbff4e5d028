"""Cases of `validate`: every configuration of a host with blended seeds, against one forward pass of it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from esper.attribution.counterfactual import CounterfactualHelper
from esper.bench.case import BenchArgs, BenchCase, Sizes
from esper.bench.fixtures import VALIDATION, growth_env, image_task
from esper.lifecycle.ramps import STYLES
from esper.rollout.threads import one_thread
from esper.seeds.blueprints import BLUEPRINTS
from esper.seeds.site import Role
from esper.training.host_training import HostTraining
from esper.training.validate import evaluate

NAME = "validate"
SIZES = Sizes(
    "SAMPLESxWIDTH",
    ((VALIDATION, 8), (VALIDATION, 32)),
    quick=((100, 8), (100, 32)),
    seconds=150.0,
)

# One slot in each block; the first configurations diverge right after the first block.
BLENDED = ("r0c0", "r0c1", "r0c2")
BLUEPRINT = "conv_light"
_BAR = 0.25  # the tree costs at most four forward passes
_BAR_SIZE = (VALIDATION, 8)


def blend(training: HostTraining) -> None:
    """Puts seeds in BLENDING into all ``BLENDED`` slots, halfway to full alpha."""
    for name in BLENDED:
        site = training.site_by_name[name]
        training.plant(site, BLUEPRINTS.get("cnn", BLUEPRINT), STYLES["LINEAR_ADD"])
        training.assign(site, Role.BLENDED, 0.5, 0.0, learning=True)


def _each(evaluated: Callable[[Sequence[object]], object], configurations: Sequence[object]) -> None:
    for configuration in configurations:
        evaluated([configuration])


def comparisons(args: BenchArgs) -> Iterator[BenchCase]:
    """Yields the tree against one configuration, and against each configuration evaluated separately."""
    for device, (samples, width) in SIZES.of(args):
        task = image_task(64, width, device, validation=samples)
        with growth_env(task, envs=1, batch=32) as env, one_thread():
            host = env.training[0]
            blend(host)
            everything = CounterfactualHelper().plan(host.sites, costly=True)
            evaluated = partial(evaluate, host, task.validation)
            bar = None
            if device.type == "cpu" and (samples, width) == _BAR_SIZE:
                bar = _BAR
            against_one = BenchCase(
                case=f"{NAME}: {len(everything)} configurations of 3 blended seeds",
                size=f"{samples:,} samples, width {width}, {', '.join(BLENDED)}",
                device=device,
                baseline="one forward, all on (bar: at most 4 times)",
                run=partial(evaluated, everything),
                run_baseline=partial(evaluated, everything[:1]),
                bar=bar,
            )
            yield against_one
            yield replace(
                against_one,
                baseline="each configuration by itself",
                run_baseline=partial(_each, evaluated, everything),
                bar=None,
            )
