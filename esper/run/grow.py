"""Growing one host of a task: the entry point for growing your own network."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from esper.config import ConfigError, TrainingConfig
from esper.data.task import Task
from esper.env.make import EnvMaker
from esper.env.slot_env import SlotVectorEnv
from esper.env.vector_env import GrowthVectorEnv
from esper.files.grown_host import committed_network
from esper.files.system_info import check_devices
from esper.hosts.grown import GrownHost
from esper.rollout.policies import controller_for
from esper.rollout.rollout import play_round
from esper.rollout.threads import one_thread
from esper.spaces.action import Op
from esper.telemetry.event import ActionTaken, Event


@dataclass(frozen=True)
class Grown:
    """A grown host compared with the same host left alone; accuracies in pp, test split.

    For a task with a score of its own, they are that score, in its unit.
    """

    network: GrownHost
    """The host with its kept seeds, on the CPU, in eval mode."""
    accuracy: float
    alone: float
    """Accuracy of a host with the same initial weights and batches, but no seeds."""
    seeds: dict[str, str]
    """Blueprint of each kept seed, by slot."""
    refusals: tuple[str, ...]
    """Distinct reasons why seeds could not be planted; empty if none was refused."""
    host_parameters: int
    parameters: int
    """Number of parameters of the host and its kept seeds."""


@one_thread()
def grow(
    task: Task, controller: str = "heuristic", epochs: int | None = None, config: TrainingConfig | None = None
) -> Grown:
    """Trains a host of ``task`` for ``epochs`` while ``controller`` grows it, then trains the same host alone.

    Args:
        task: what to train on, and the host; ``esper.graft`` makes one of any network.
        controller: ``heuristic``, ``schedule:FILE.toml``, ``random``, ``pretrained`` (the shipped agent), or
            ``checkpoint:PATH`` of an agent that learned on a host with blueprints of the same names.
        epochs: length of the episode; None: the config's, or the task's.
        config: all other values; the task fills in its sizes. None: the defaults, with the no-growth baseline measured
            on one host.

    Raises:
        ConfigError: the controller is unknown or does not fit, or the data cannot serve the sizes.
    """
    if controller == "none":
        raise ConfigError("controller none grows nothing: name another one; its result includes the host left alone")
    if config is None:
        config = TrainingConfig().with_values(env={"baseline_episodes": 1})
    values = {"n_envs": 1} | ({} if epochs is None else {"episode_length": epochs})
    check_devices(config.run.device)
    maker = EnvMaker.of(config.with_values(env=values), task)
    refusals: dict[str, None] = {}

    def listen(event: Event) -> None:
        if isinstance(event, ActionTaken) and event.op == Op.GERMINATE.name and not event.accepted:
            refusals[event.reason] = None

    with closing(maker.make(emit=listen)) as env:
        assert isinstance(env, GrowthVectorEnv)
        accuracy = _play(env, controller, maker.config)
        network = committed_network(env.training[0])
    with closing(maker.make()) as same_host:
        same_host.baseline = env.baseline
        alone = _play(same_host, "none", maker.config)
    return Grown(
        network=network,
        accuracy=accuracy,
        alone=alone,
        seeds={name: kept.blueprint for name, kept in network.kept.items()},
        refusals=tuple(refusals),
        host_parameters=network.host.parameter_count,
        parameters=sum(parameter.numel() for parameter in network.parameters()),
    )


def _play(env: SlotVectorEnv, controller: str, config: TrainingConfig) -> float:
    """Plays one episode and returns the test accuracy of the host, in pp, or its score in the task's unit."""
    play_round(env, controller_for(controller, config, env, config.run.seed), config.run.seed)
    return env.score.of(float(env.test_accuracy()[0]))
