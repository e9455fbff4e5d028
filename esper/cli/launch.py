"""Ranks of `esper run`: joining those that torchrun started, or starting some on this machine as torchrun does."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from esper.config import ConfigError
from esper.config.given import FiniteRange
from esper.files.claim import require_empty
from esper.run.interrupt import SIGNALS

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from esper.config import TrainingConfig
    from esper.training.execution.ranks import RunRanks

LAUNCHED = "ESPER_LAUNCHED"
"""Environment variable: a folder of :meth:`RankOptions.launch`, in the ranks that it started.

It reports those that are killed.
"""
REFUSED = "refused"
"""File in that folder once invalid input was reported, which another attempt would only repeat."""
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Environment variable: seconds that torch's launcher waits for ranks that were asked to stop, until it kills them."""
SHUTDOWN_SECONDS = "300"
"""That time unless the variable is set: ranks stop at the end of a step."""
LAUNCHER_SECONDS = 30
"""Seconds from the end of a rank until torch's launcher kills those that have not ended by themselves."""
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Environment variable: 1 if the ranks of each attempt meet in a store of their own.

Otherwise ranks that were started again find the addresses of those before them, and wait for those forever
(https://github.com/pytorch/pytorch/issues/135712).
"""
WAITING_SECONDS = 10
"""Seconds of waiting for other ranks to start until the command says so."""
ADDRESS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that say which ranks meet, and where."""
Command = TypeVar("Command", bound=Callable[..., Any])


def rank_options(command: Command) -> Command:
    """Adds the options of ranks: the arguments of :meth:`RankOptions.of`."""
    for option in (
        click.option(
            "--rank-timeout",
            type=FiniteRange(min=0, min_open=True, max=1e6),
            default=30.0,
            metavar="MINUTES",
            help="Minutes to wait for the answer of a process before the command ends with an error.  [default: 30]",
        ),
        click.option(
            "--max-restarts",
            type=click.IntRange(min=0),
            metavar="N",
            help="With --processes: max number of restarts from the last checkpoint after a failure.  [default: 0]",
        ),
        click.option(
            "--processes",
            metavar="N|auto",
            help="Spread the hosts over N processes; auto: one per core that may be used, or per GPU.  [default: this "
            "process]",
        ),
    ):
        command = option(command)
    return command


@dataclass(frozen=True)
class RankOptions:
    """The part of a command that deals with ranks: it serves rank 0, starts ranks, or plays, alone or as rank 0."""

    processes: int | None
    """Number of ranks to start; None: this process plays; 0: as many as suit the machine."""
    max_restarts: int
    timeout_minutes: float

    @classmethod
    def of(cls, processes: str | None, max_restarts: int | None, timeout_minutes: float) -> RankOptions:
        """Checks the options. Raises ConfigError if they are wrong or contradict each other."""
        if processes is None and max_restarts is not None:
            raise ConfigError("--max-restarts is for --processes; torchrun has an option of this name itself")
        if processes is not None and not re.fullmatch(r"auto|[1-9]\d{0,3}", processes):
            raise ConfigError(f"--processes is {processes!r}: give a number of processes, 1 to 9999, or auto")
        if processes is not None and "RANK" in os.environ and LAUNCHED not in os.environ:
            raise ConfigError("--processes starts ranks, but torchrun has started some already: leave it out")
        _check_environment()
        if LAUNCHED in os.environ and (Path(os.environ[LAUNCHED]) / REFUSED).exists():
            raise click.exceptions.Exit(2)
        count = None if processes is None or "RANK" in os.environ else 0 if processes == "auto" else int(processes)
        return cls(count, max_restarts or 0, timeout_minutes)

    @property
    def is_other(self) -> bool:
        """True in a rank that trains hosts for rank 0 and does nothing else."""
        return int(os.environ.get("RANK", 0)) > 0

    @property
    def restarted(self) -> bool:
        """True in a process that was started again after a failure, or may have been: a machine counts its own only."""
        if "RANK" not in os.environ:  # what a launcher left in a shell
            return False
        several = int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1
        return _number("TORCHELASTIC_RESTART_COUNT") > 0 or (several and _number("TORCHELASTIC_MAX_RESTARTS") > 0)

    def clear(self, folder: Path) -> None:
        """Removes what an attempt that cannot be resumed has left in ``folder``, which :meth:`launch` found empty."""
        if LAUNCHED in os.environ and self.restarted:
            shutil.rmtree(folder, ignore_errors=True)

    def serve_if_other(self) -> None:
        """Trains hosts for rank 0 until it is done, and then ends the command; does nothing in rank 0.

        Signals are left to rank 0, which ends the run after the step.
        """
        if not self.is_other:
            return

        from esper.env.rank_hosts import RankServer
        from esper.training.executor import RankLost

        with self.joined() as ranks:
            if ranks is None:
                raise ConfigError(f"the environment has RANK={os.environ['RANK']} but WORLD_SIZE=1: unset both")
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            try:
                RankServer(ranks).serve()
            except RankLost as lost:
                if lost.hangs and ranks.rank == 1:  # else whoever ended rank 0 has reported it
                    raise click.ClickException(str(lost)) from None
                raise click.exceptions.Exit(1) from None
        raise click.exceptions.Exit(0)

    @contextmanager
    def joined(self) -> Iterator[RunRanks | None]:
        """Joins the other ranks, and dismisses them in the end if this is rank 0; None without others.

        Raises ConfigError if ranks that are started again could not meet.
        """
        from esper.training.execution.ranks import RunRanks

        shares_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if shares_store and _number("TORCHELASTIC_MAX_RESTARTS"):
            if self.is_other:  # the first one reports it
                raise click.exceptions.Exit(2)
            raise ConfigError(f"torchrun --max-restarts needs {OWN_STORE}=1 in the environment, or a restart hangs")
        ranks = None
        try:
            with ExitStack() as stack:
                with signals_end(), waiting_reported():
                    ranks = stack.enter_context(RunRanks.joined(self.timeout_minutes))
                yield ranks
        except (click.Abort, KeyboardInterrupt):
            # Nobody interrupted it: the launcher signals a rank when another one is lost, and reports that itself.
            if LAUNCHED in os.environ and ranks is not None and ranks.lost is not None:
                raise click.exceptions.Exit(1) from None
            raise

    def launch(self, config: TrainingConfig, more: Sequence[str] = (), new: Path | None = None) -> None:
        """Runs this command, with ``more`` arguments, in :attr:`processes` processes, and waits for them.

        Args:
            config: what to play; the default number of processes depends on it.
            new: the folder of something new, which must be empty.

        Raises:
            ConfigError: ``new`` is not empty, or an argument names a pipe.
            click.ClickException: a rank was killed, or ended by itself; the message names it, and the signal or code.
            click.exceptions.Exit: rank 0 has ended with an error or was interrupted, which it has reported.
        """
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        refuse_pipes(sys.argv)
        if new is not None:
            require_empty(new)
        processes = self.processes or fitting(config)
        os.environ.setdefault(SHUTDOWN, SHUTDOWN_SECONDS)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # they are all on this machine
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # gloo also logs the errors that it raises
        os.environ[OWN_STORE] = "1"
        heard = [number.name for number in heard_signals()]
        with tempfile.TemporaryDirectory(prefix="esper-ranks-") as logs, quiet_launcher():
            os.environ[LAUNCHED] = logs
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
                signals_to_handle=",".join(heard),  # else it also handles those that were ignored
            )
            try:
                elastic_launch(launch_config, sys.executable)(*_same_esper(), *sys.argv[1:], *more)
            except SignalException:
                raise click.exceptions.Exit(130) from None
            except ChildFailedError as error:
                codes = codes_of_first(error.failures)
                if words := how_ranks_ended(codes):
                    raise click.ClickException(words) from None
                ended = [code for code in codes.values() if code > 0]
                raise click.exceptions.Exit(ended[0]) from None


def fitting(config: TrainingConfig) -> int:
    """Returns how many ranks suit this machine: one per GPU that the config names, else one per core that may be used.

    There are at most as many as hosts. Raises ConfigError if a device cannot be used.
    """
    from esper.data.names import DRAWN, SIMULATED
    from esper.data.task import DataOptions, resolve
    from esper.data.tasks import load_task
    from esper.env import varied
    from esper.files.system_info import check_devices
    from esper.training.execution.cores import usable_cores

    devices = check_devices(config.run.device)
    if config.task.name in SIMULATED:
        return 1  # such hosts are not spread
    if config.task.name in DRAWN:
        hosts = varied.resolve(config).env.n_envs
    else:
        hosts = resolve(config, load_task(config.task.name, DataOptions.of(config.task))).env.n_envs
    return min(usable_cores() if devices[0].type == "cpu" else len(devices), hosts)


def refuse_pipes(arguments: Sequence[str]) -> None:
    """Raises ConfigError if an argument, or what stands behind = or : in it, is a pipe, which is read only once."""
    for argument in arguments:
        for part in (argument, argument.partition("=")[2], argument.rpartition(":")[2]):
            if Path(part).is_fifo():
                raise ConfigError(
                    f"{part} is a pipe, which only one process can read; save it as a file, or leave out --processes"
                )


def heard_signals() -> list[signal.Signals]:
    """Returns the signals that this process does not ignore."""
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def signals_end() -> Iterator[None]:
    """Lets signals end this process at once in the block, also while it waits outside of Python for other ranks."""
    before = {}
    for number in heard_signals():
        before[number] = signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, act in before.items():
            signal.signal(number, act)


@contextmanager
def waiting_reported() -> Iterator[None]:
    """Says what the block waits for if it takes longer than a launcher needs to start all ranks."""
    words = "Waiting for all ranks to start: the environment has"
    for name in ADDRESS:
        words += f" {name}={os.environ.get(name, '')}"
    words += "."
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        words += " If that is left from another program, stop this command and unset RANK and WORLD_SIZE."
    timer = threading.Timer(WAITING_SECONDS, click.echo, [words], {"err": True})
    timer.daemon = True
    if "RANK" in os.environ and LAUNCHED not in os.environ:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


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


def echo_waiting(ranks: RunRanks | None) -> None:
    """Prints how much of the time of joint work each rank only waited; nothing without ranks."""
    if ranks is None:
        return
    shares = ", ".join(f"rank {rank} {100 * idle / ranks.seconds:.0f} %" for rank, idle in enumerate(ranks.idle))
    click.echo(f"Waiting for other ranks, of {ranks.seconds:.0f} s of joint work: {shares}.")


def leave_to_launcher(error: BaseException) -> None:
    """Ends rank 0 without words if another rank is gone: who started both knows why, and reports it."""
    from esper.training.executor import RankLost

    if isinstance(error, RankLost) and not error.hangs and LAUNCHED in os.environ:
        raise click.exceptions.Exit(1) from None


def is_same(ours: TrainingConfig, theirs: TrainingConfig) -> bool:
    """True if ``theirs`` has all values of ``ours`` that are not left open."""

    def holds(ours: Any, theirs: Any) -> bool:
        if isinstance(ours, dict):
            return all(holds(value, theirs[name]) for name, value in ours.items())
        return ours in (None, "auto", theirs)

    return holds(ours.model_dump(), theirs.model_dump())


def _same_esper() -> list[str]:
    """Returns the arguments of Python that run the Esper of this process.

    A package called esper in the current folder, such as another checkout, must not run instead.
    """
    here = Path(__file__).resolve().parents[2] == Path.cwd()
    return ["-m", "esper"] if here else ["-P", "-m", "esper"]


def note_refusal() -> None:
    """Notes for further attempts that invalid input was reported."""
    if LAUNCHED in os.environ and Path(os.environ[LAUNCHED]).is_dir():
        (Path(os.environ[LAUNCHED]) / REFUSED).touch()


def _check_environment() -> None:
    """Raises ConfigError if variables of torchrun are set, such as in a shell, but not all that joining ranks needs."""
    rank = os.environ.get("RANK", "0")
    size = os.environ.get("WORLD_SIZE", "1")
    complete = rank.isdecimal() and size.isdecimal() and (int(rank) == 0 or "WORLD_SIZE" in os.environ)
    if complete and "RANK" in os.environ and int(size) > 1:
        complete = "MASTER_ADDR" in os.environ and os.environ.get("MASTER_PORT", "").isdecimal()
    if not complete:
        raise ConfigError(f"the environment has RANK={rank} but not all that torchrun sets: use torchrun, or unset it")
    if "RANK" not in os.environ:
        return
    for name, low, below in (
        ("WORLD_SIZE", 1, None),
        ("RANK", 0, int(size) if int(size) > 1 else None),
        ("LOCAL_WORLD_SIZE", 1, None),
        ("LOCAL_RANK", 0, None),
        ("MASTER_PORT", 0, 2**16),
        ("GROUP_WORLD_SIZE", 1, None),
        ("TORCHELASTIC_RESTART_COUNT", 0, None),
        ("TORCHELASTIC_MAX_RESTARTS", 0, None),
    ):
        value = os.environ.get(name, str(low))
        if not value.isdecimal() or int(value) < low or (below is not None and int(value) >= below):
            limit = "" if below is None else f" and below {below}"
            raise ConfigError(
                f"the environment has {name}={value}; expected a whole number from {low} on{limit}: use torchrun, or "
                "unset RANK"
            )


def _number(variable: str) -> int:
    return int(os.environ.get(variable, 0))


def codes_of_first(failures: Mapping[int, ProcessFailure]) -> dict[int, int]:
    """Returns the exit codes of ranks by rank, without those that the launcher killed because others had ended."""
    first = min(failure.timestamp for failure in failures.values())
    return {
        rank: failure.exitcode
        for rank, failure in sorted(failures.items())
        if failure.timestamp < first + LAUNCHER_SECONDS
    }


def how_ranks_ended(codes: Mapping[int, int]) -> str:
    """Describes how ranks ended, from their exit codes by rank; empty if they have reported it."""
    # The launcher ends what is left by SIGTERM, so others were first.
    first = [rank for rank, code in codes.items() if code not in (-signal.SIGTERM, 1, 2)]
    if not first and max(codes.values()) > 0:
        return ""
    return " and ".join(_ended(rank, codes[rank]) for rank in first or codes)


def _ended(rank: int, code: int) -> str:
    if code > 0:
        return f"rank {rank} ended with exit code {code}"
    name = signal.Signals(-code).name
    memory = ", perhaps by the system because memory ran out" if name == "SIGKILL" else ""
    return f"rank {rank} was killed ({name}{memory})"
