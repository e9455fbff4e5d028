"""The arguments and the saved state of a Grower: what they stand for, and errors for those that do not fit."""

from __future__ import annotations

import math
import traceback
from collections.abc import Collection, Mapping, Sequence, Sized
from functools import partial
from numbers import Integral
from reprlib import repr as short
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from esper.agents.make import OwnController
from esper.agents.needs import default_controller, with_needs, with_price
from esper.agents.spec import ControllerSpec
from esper.config import ConfigError, TrainingConfig
from esper.config.resolved import ResolvedConfig
from esper.core.blueprints import BlueprintRegistry
from esper.core.chosen import choose_blueprints
from esper.core.place import Place
from esper.core.state import Setting
from esper.grower.gradients import Ranks
from esper.hosts.example import outputs_of, require_outputs
from esper.hosts.sources import SitePath

if TYPE_CHECKING:
    from esper.grower.grower import Grower

FORMAT = 8
"""Format of a Grower's state."""
SLOT = "slot"
"""Key of a seed's parameter group; no other group has it."""


def resolved(config: TrainingConfig, decisions: int) -> ResolvedConfig:
    """Returns the config of one host that makes ``decisions`` decisions and incubates straight through."""
    env = config.env
    chosen = {
        "n_envs": 1,
        "episode_length": decisions,
        "need_every": 1,  # by :meth:`Grower.measure_need`
        "incubation": "ste",
        "slots": None,
        "at_once": env.at_once is not False,
    }
    return ResolvedConfig.parse(config.tables_with({"env": chosen, "run": {"rounds": 1}}))


def asked(
    controller: str | OwnController | None,
    config: TrainingConfig | Mapping[str, Any] | None,
    paths: Mapping[str, SitePath],
    setting: Setting,
    merge: bool | None,
    price: float | None,
    ranks: Ranks,
) -> tuple[str | OwnController, TrainingConfig, str]:
    """Returns the controller, the default one for None, and the config with what other arguments and it ask for.

    The last one are words for why the default is not the advisor, if the loop has told what only that one needs. Raises
    ConfigError if ``price`` has no effect.
    """
    if not isinstance(config, TrainingConfig):
        config = TrainingConfig.parse(dict(config or {}))
    if merge is None and config.env.merge is None and ranks.parallel:
        merge = False
    if merge is not None:
        config = config.with_values(env={"merge": merge})
    reason = ""
    if controller is None:
        widens = any(path.source is not None for path in paths.values())
        controller, reason = default_controller(config, widens, _missing(setting))
    config = with_price(config, price, controller, reason)
    if not (setting.samples or setting.classes):
        reason = ""
    return controller, with_needs(controller, config), reason


def _missing(setting: Setting) -> str:
    """Words what the advisor needs to know and a loop has not told; "" if that is nothing."""
    words = []
    if not setting.samples:
        words.append("samples=, the DataLoader")
    elif not setting.updates:
        words.append("the DataLoader as samples=, for the number of steps in an epoch")
    if not setting.classes:
        words.append("classes=")
    return " and ".join(words)


def check_merge(config: ResolvedConfig, ranks: Ranks) -> None:
    """Raises ConfigError if seeds are to be merged where gradients keep their shapes."""
    if config.env.merge and ranks.parallel:
        raise ConfigError("merge does not work with DistributedDataParallel, which keeps the shapes of gradients")


def arguments_of(grower: Grower) -> dict[str, Any]:
    """Returns the arguments of a Grower that its state depends on, as plain values."""
    return {
        "sites": {slot: str(path) for slot, path in grower.paths.items()},
        "controller": ControllerSpec.of(grower._loaded_controller).name,
        "horizon": int(grower.horizon),
        "incubation": grower.incubation,
        "points": float(grower.points),
        "governor": bool(grower.governed),
    }


def check_state(
    state: Mapping[str, Any],
    arguments: Mapping[str, Any],
) -> None:
    """Raises ConfigError for the state of a Grower that was made with other ``arguments``."""
    if state.get("format") != FORMAT:
        raise ConfigError(
            f"the state has format {state.get('format')}; this version reads {FORMAT}: continue with the version that "
            "saved it, or start again"
        )
    saved = state["arguments"]
    others = []
    for name, value in arguments.items():
        if saved[name] != value:
            others.append(f"{name}={saved[name]!r}, not {value!r}")
    if others:
        raise ConfigError(f"the state is that of a Grower with {'; '.join(others)}: make this one with equal arguments")


def setting_of(samples: object, classes: int | None, model: nn.Module, example: Any) -> Setting:
    """Reads what a loop says of its training. Raises ConfigError for a number that does not fit.

    Outputs of ``model`` are compared with ``classes`` only if there is an ``example``.
    """
    updates = 0
    count = samples
    try:
        if isinstance(samples, DataLoader):
            updates = len(samples)
            count = len(samples.dataset)  # type: ignore[arg-type]
        elif isinstance(samples, Sized) and not isinstance(samples, str):
            count = len(samples)
    except TypeError:
        raise ConfigError("samples is data that has no length; pass the number of samples") from None
    for name, value, least in (("samples", count, 1), ("classes", classes, 2)):
        if value is not None and (not isinstance(value, Integral) or value < least):
            raise ConfigError(f"{name} is {short(value)}; it must be a number of {least} or more, or None")
    if classes is not None and example is not None:
        require_outputs(classes, outputs_of(model, example))
    return Setting(samples=int(count or 0), updates=updates, classes=int(classes or 0))  # type: ignore[call-overload]


def check_numbers(
    horizon: int,
    baseline: Sequence[float] | None,
    points: float,
) -> None:
    """Raises ConfigError for a number that does not fit."""
    if not isinstance(horizon, Integral) or horizon < 2:
        raise ConfigError(f"horizon is {short(horizon)}; it is the number of epochs that the loop trains, at least 2")
    if not (math.isfinite(points) and points > 0):
        raise ConfigError(f"points is {points}; it must be positive")
    if baseline is not None and len(baseline) != horizon:
        raise ConfigError(f"baseline has {len(baseline)} scores; one after each of the {horizon} epochs is needed")


def check_incubation(incubation: str, ranks: Ranks) -> None:
    """Raises ConfigError for a way to incubate that does not work."""
    if incubation not in ("ste", "shadow"):
        raise ConfigError(f"incubation is {short(incubation)}; it must be 'ste' or 'shadow'")
    if incubation == "shadow" and ranks.parallel:
        raise ConfigError("incubation='shadow' does not work with DistributedDataParallel; use 'ste'")


def check_blueprints(
    wanted: tuple[str, ...] | None,
    registry: BlueprintRegistry,
    paths: Mapping[str, SitePath],
    topology: str | None,
) -> None:
    """Raises ConfigError for a wanted blueprint that fits at no site of this topology; None: of any."""
    reading = {path.source is not None for path in paths.values()}
    topologies = (topology,) if topology else registry.topologies()
    possible: dict[str, None] = {}
    for kind in topologies:
        possible |= dict.fromkeys(registry.possible(kind, reading))
    places = [Place(slot, 0, path.source is not None) for slot, path in paths.items()]
    misfit = partial(registry.misfit, topology or "", places)
    choose_blueprints(wanted, tuple(possible), f"{topology or 'such'} hosts", misfit)


def require_trained_by(model: nn.Module, optimizer: Optimizer) -> None:
    """Raises ConfigError if the optimizer holds parameters, and none of those of ``model`` that are trained.

    A parameter may be a view of a larger tensor, or have one in its place, so memory is compared, too.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not trained or not held or set(trained) & set(held):
        return
    if _memory_of(trained) & _memory_of(held):
        return
    raise ConfigError(
        f"the optimizer holds {len(held)} parameters and none of the {len(trained)} of this model that need gradients, "
        "which would not learn: make it with the parameters of the model that grows"
    )


def _memory_of(parameters: Sequence[Tensor]) -> set[int]:
    """Returns addresses of the memory of ``parameters``, without those that have none yet."""
    addresses: set[int] = set()
    for parameter in parameters:
        if not is_lazy(parameter):
            addresses.add(parameter.untyped_storage().data_ptr())
    return addresses - {0}


def require_known(optimizer: Optimizer, given: Collection[str]) -> None:
    """Raises ConfigError for a group with the key ``SLOT`` that no Grower has made: it would be taken for a seed's.

    ``given`` are the values of the key that Growers have given.
    """
    for index, group in enumerate(optimizer.param_groups):
        if SLOT in group and str(group[SLOT]).removeprefix("kept ") not in given:
            raise ConfigError(
                f"parameter group {index} of the optimizer has the key {SLOT!r} ({group[SLOT]!r}), which marks groups "
                "of seeds: give yours another name, or delete the key if a Grower of another process has left it"
            )


def refuse_other_savers(_optimizer: Optimizer) -> None:
    """Raises ConfigError if torch.distributed.checkpoint saves the optimizer: it finds no names of seeds' parameters.

    A hack: nothing but the stack says who asks for a state.
    """
    files = [frame.filename.replace("\\", "/") for frame in traceback.extract_stack()]
    if any(file.endswith("torch/distributed/checkpoint/state_dict.py") for file in files):
        raise ConfigError(
            "torch.distributed.checkpoint saves parameters that are in the model, and seeds are not while they grow: "
            "save optimizer.state_dict() and grower.state_dict(), or wait for grower.finish()"
        )
