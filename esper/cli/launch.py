"""Ranks of `esper run`: joining those that torchrun started, or starting some on this machine as torchrun does."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from esper.config import ConfigError, TrainingConfig
from esper.rollout.interrupt import SIGNALS

if TYPE_CHECKING:
    from esper.training.execution.ranks import RunRanks

LAUNCHED = "ESPER_LAUNCHED"
"""Environment variable of ranks that :meth:`RankOptions.launch` started, which reports those that are killed."""
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Environment variable: seconds that torch's launcher waits for ranks that were asked to stop, until it kills them."""
SHUTDOWN_SECONDS = "300"
"""That time unless the variable is set: ranks stop at the end of a step."""
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Environment variable: 1 if the ranks of each attempt meet in a store of their own.

Otherwise ranks that were started again find the addresses of those before them, and wait for those forever
(https://github.com/pytorch/pytorch/issues/135712).
"""
Command = TypeVar("Command", bound=Callable[..., Any])


def rank_options(command: Command) -> Command:
    """Adds the options of ranks: the arguments of :meth:`RankOptions.of`."""
    for option in (
        click.option(
            "--rank-timeout",
            type=click.FloatRange(min=0, min_open=True),
            default=30.0,
            metavar="MINUTES",
            help="A process that does not answer for so long ends the command.  [default: 30]",
        ),
        click.option(
            "--max-restarts",
            type=click.IntRange(min=0),
            metavar="N",
            help="With --processes: how often to go on from the last checkpoint after a failure.  [default: 0]",
        ),
        click.option(
            "--processes", metavar="N|auto", help="Spread the hosts over N processes; auto: as many as cores."
        ),
    ):
        command = option(command)
    return command


@dataclass(frozen=True)
class RankOptions:
    """What a command does about ranks: serve rank 0, start ranks, or play, alone or as rank 0."""

    processes: int | None
    """Number of ranks to start; None: this process plays; 0: as many as suit the machine."""
    max_restarts: int
    timeout_minutes: float

    @classmethod
    def of(cls, processes: str | None, max_restarts: int | None, timeout_minutes: float) -> RankOptions:
        """Checks the options. Raises ConfigError if they are wrong or contradict each other."""
        if processes is None and max_restarts is not None:
            raise ConfigError("--max-restarts is for --processes; torchrun has an option of this name itself")
        if processes is not None and processes != "auto" and not (processes.isdecimal() and int(processes)):
            raise ConfigError(f"--processes is {processes!r}: give a number of processes, at least 1, or auto")
        if processes is not None and "RANK" in os.environ and LAUNCHED not in os.environ:
            raise ConfigError("--processes starts ranks, but torchrun has started some already: leave it out")
        count = None if processes is None or "RANK" in os.environ else 0 if processes == "auto" else int(processes)
        return cls(count, max_restarts or 0, timeout_minutes)

    @property
    def is_other(self) -> bool:
        """True in a rank that trains hosts for rank 0 and does nothing else."""
        return int(os.environ.get("RANK", 0)) > 0

    @property
    def restarted(self) -> bool:
        """True in a process that the launcher started again after a failure."""
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0

    def serve(self) -> None:
        """Trains hosts for rank 0 until it is done. Signals are left to rank 0, which ends the run after the step."""
        from esper.env.rank_hosts import RankServer
        from esper.training.execution.ranks import RankLost

        with self.joined() as ranks:
            assert ranks is not None
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            try:
                RankServer(ranks).serve()
            except RankLost as lost:
                if lost.hangs and ranks.rank == 1:  # else whoever ended rank 0 has reported it
                    raise click.ClickException(str(lost)) from None
                raise click.exceptions.Exit(1) from None

    @contextmanager
    def joined(self) -> Iterator[RunRanks | None]:
        """Joins the other ranks, and dismisses them in the end if this is rank 0; None without others.

        Raises ConfigError if ranks that are started again could not meet.
        """
        from esper.training.execution.ranks import RunRanks

        shares_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if shares_store and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
            raise ConfigError(f"torchrun --max-restarts needs {OWN_STORE}=1 in the environment, or a restart hangs")
        with ExitStack() as stack:
            with signals_end():
                ranks = stack.enter_context(RunRanks.joined(self.timeout_minutes))
            yield ranks

    def launch(self, config: TrainingConfig, more: Sequence[str] = ()) -> None:
        """Runs this command, with ``more`` arguments, in as many processes as it was told, and waits for them.

        ``config`` says how many suit this machine.

        Raises:
            click.ClickException: a rank was killed; the message names it and the signal.
            click.exceptions.Exit: rank 0 has ended with an error or was interrupted, which it has reported.
        """
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        processes = self.processes or fitting(config)
        os.environ.setdefault(SHUTDOWN, SHUTDOWN_SECONDS)
        os.environ[OWN_STORE] = "1"
        os.environ[LAUNCHED] = "1"
        with tempfile.TemporaryDirectory(prefix="esper-ranks-") as logs, quiet_launcher():
            launch_config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=processes,
                run_id=f"esper-{os.getpid()}",
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                local_addr="localhost",
                max_restarts=self.max_restarts,
                logs_specs=DefaultLogsSpecs(log_dir=logs),
            )
            try:
                elastic_launch(launch_config, sys.executable)("-m", "esper", *sys.argv[1:], *more)
            except SignalException:
                raise click.exceptions.Exit(130) from None
            except ChildFailedError as error:
                codes = {rank: failure.exitcode for rank, failure in sorted(error.failures.items())}
                killed = {rank: code for rank, code in codes.items() if code < 0}
                # The launcher ends what is left by SIGTERM, so others were first.
                first = {rank: code for rank, code in killed.items() if code != -signal.SIGTERM} or killed
                if first:
                    raise click.ClickException(" and ".join(_killed(*one) for one in first.items())) from None
                raise click.exceptions.Exit(next(iter(codes.values()))) from None


def fitting(config: TrainingConfig) -> int:
    """Returns how many ranks suit this machine: one per GPU that the config names, else one per physical core.

    There are at most as many as hosts.
    """
    import torch

    from esper import _runtime
    from esper.data.task import DataOptions, resolve
    from esper.data.tasks import load_task
    from esper.training.execution.multi_gpu import chosen_devices

    hosts = resolve(config, load_task(config.task.name, DataOptions.of(config.task))).env.n_envs
    names = chosen_devices(config.run.device).split(",")
    on_cpu = torch.device(names[0]).type == "cpu"
    places = _runtime.physical_cores() if on_cpu else len(names)
    return min(places, hosts)


@contextmanager
def signals_end() -> Iterator[None]:
    """Lets signals end this process at once in the block, also while it waits outside of Python for other ranks."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    try:
        yield
    finally:
        for number, act in before.items():
            signal.signal(number, act)


@contextmanager
def quiet_launcher() -> Iterator[None]:
    """Silences the logs of torch's launcher, which repeat what is reported here."""
    import logging

    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def waiting_words(ranks: RunRanks) -> str:
    """Formats how much of the time of joint work each rank only waited."""
    shares = ", ".join(f"rank {rank} {100 * idle / ranks.seconds:.0f} %" for rank, idle in enumerate(ranks.idle))
    return f"Waiting for other ranks, of {ranks.seconds:.0f} s of joint work: {shares}."


def leave_to_launcher(error: BaseException) -> None:
    """Ends rank 0 without words if another rank is gone: who started both knows why, and reports it."""
    from esper.training.execution.ranks import RankLost

    if isinstance(error, RankLost) and not error.hangs and LAUNCHED in os.environ:
        raise click.exceptions.Exit(1) from None


def _killed(rank: int, exitcode: int) -> str:
    name = signal.Signals(-exitcode).name
    memory = ", perhaps by the system because memory ran out" if name == "SIGKILL" else ""
    return f"rank {rank} was killed ({name}{memory})"
