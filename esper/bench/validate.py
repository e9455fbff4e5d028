"""Cases of `validate`: every configuration of a host with blended seeds, against one forward pass of it."""

from collections.abc import Callable, Iterator, Sequence
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
SIZES = Sizes("SAMPLESxWIDTH", ((VALIDATION, 8), (VALIDATION, 32)), quick=((100, 8), (100, 32)), seconds=30.0)

# One slot in each block; the first configurations diverge right after the first block.
BLENDED = ("r0c0", "r0c1", "r0c2")
BLUEPRINT = "conv_light"
_BAR, _BAR_SIZE = 0.25, (VALIDATION, 8)  # the tree costs at most four forward passes


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
            ours, one, each = (
                partial(evaluated, everything),
                partial(evaluated, everything[:1]),
                partial(_each, evaluated, everything),
            )
            case = f"{NAME}: {len(everything)} configurations of 3 blended seeds"
            size = f"{samples:,} samples, width {width}, {', '.join(BLENDED)}"
            bar = _BAR if (samples, width) == _BAR_SIZE and device.type == "cpu" else None
            yield BenchCase(case, size, device, "one forward, all on (bar: at most 4 times)", ours, one, bar)
            yield BenchCase(case, size, device, "each configuration by itself", ours, each)
