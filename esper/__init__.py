"""Esper grows neural networks while they train.

The public API; each name is imported when it is first used, so that ``import esper`` is cheap:

- ``TrainingConfig``: every parameter of a run; ``ConfigError``: raised for invalid input, with an explanation.
- ``Experiment``: a run, new or resumed; ``RunSummary``: its result.
- ``compare_controllers``: compares controllers, including trained ones, on the same held-out hosts.
- ``make_env``: the vector env of a task, for your own agents.
- ``graft``: makes a host of any ``nn.Module``; ``HostFamily``: such hosts in any width.
- ``find_sites``: lists where a model can grow; ``FoundSite``: one such place.
- ``Task``, ``Split``, ``Augmentation``: your own data to train it on.
- ``advise``: predicts what wider layers would bring a network; ``Advice``: its answer.
- ``grow``: grows one host of a task; ``Grown``: its result.
- ``Grower``: grows a model inside a training loop of your own; ``GrowthStep``: what one step did; ``GrowthSummary``:
  what all of them did.
- ``export``, ``load_host``, ``accuracy``: save a grown network, load it as an ``nn.Module``, and evaluate it.
- ``plain``: makes a grown network an ordinary module, which needs no Esper to be loaded, exported and run.
"""

from __future__ import annotations

import importlib
import random
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper.compare.comparison import compare_controllers
    from esper.config import ConfigError, TrainingConfig
    from esper.data.split import Split
    from esper.data.task import Augmentation, Task
    from esper.env.make import make_env
    from esper.files.grown_host import accuracy, export, load_host
    from esper.grower.grower import Grower
    from esper.grower.report import GrowthStep
    from esper.grower.summary import GrowthSummary
    from esper.hosts.find import FoundSite, find_sites
    from esper.hosts.graft import graft
    from esper.hosts.plain import plain
    from esper.hosts.sizes import HostFamily
    from esper.run.advice import Advice, advise
    from esper.run.experiment import Experiment
    from esper.run.grow import grow
    from esper.run.grown import Grown
    from esper.run.telemetry import RunSummary

__version__ = "0.1.0"

_HOMES = {
    "Advice": "esper.run.advice",
    "Augmentation": "esper.data.task",
    "ConfigError": "esper.config",
    "Experiment": "esper.run.experiment",
    "FoundSite": "esper.hosts.find",
    "Grower": "esper.grower.grower",
    "Grown": "esper.run.grown",
    "GrowthStep": "esper.grower.report",
    "GrowthSummary": "esper.grower.summary",
    "HostFamily": "esper.hosts.sizes",
    "RunSummary": "esper.run.telemetry",
    "Split": "esper.data.split",
    "Task": "esper.data.task",
    "TrainingConfig": "esper.config",
    "accuracy": "esper.files.grown_host",
    "advise": "esper.run.advice",
    "compare_controllers": "esper.compare.comparison",
    "export": "esper.files.grown_host",
    "find_sites": "esper.hosts.find",
    "graft": "esper.hosts.graft",
    "grow": "esper.run.grow",
    "load_host": "esper.files.grown_host",
    "make_env": "esper.env.make",
    "plain": "esper.hosts.plain",
}
__all__ = [
    "Advice",
    "Augmentation",
    "ConfigError",
    "Experiment",
    "FoundSite",
    "Grower",
    "Grown",
    "GrowthStep",
    "GrowthSummary",
    "HostFamily",
    "RunSummary",
    "Split",
    "Task",
    "TrainingConfig",
    "accuracy",
    "advise",
    "compare_controllers",
    "export",
    "find_sites",
    "graft",
    "grow",
    "load_host",
    "make_env",
    "plain",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'esper' has no attribute {name!r}; it has: {', '.join(__all__)}")
    drawn = random.getstate()
    module = importlib.import_module(_HOMES[name])
    random.setstate(drawn)  # rich draws when it is imported
    return getattr(module, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


# As in gymnasium.make("esper:esper/Growth-v0"), which imports this module. Gymnasium reads no entry points, and imports
# no package that is not named in an id, so nothing else could register it there; `import esper.env` always does.
if "gymnasium" in sys.modules:
    importlib.import_module("esper.env")
