"""Options shared by several commands, and how they are combined into one config."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from esper.agents.spec import ControllerSpec
from esper.config import ConfigError
from esper.config.given import PATH
from esper.data.names import require_read, require_task
from esper.data.user_code import is_user_task, refuse_untrusted
from esper.files.claim import drop_if_empty, new_subfolder, require_empty

if TYPE_CHECKING:
    from esper.config import TrainingConfig

Command = TypeVar("Command", bound=Callable[..., Any])


# Flag, the config value that it sets, type, help.
FLAGS: tuple[tuple[str, tuple[str, str], click.ParamType[Any], str], ...] = (
    ("--task", ("task", "name"), click.STRING, "Task that hosts are trained on; see `esper tasks`."),
    ("--envs", ("env", "n_envs"), click.INT, "Number of hosts trained together."),
    ("--episode-length", ("env", "episode_length"), click.INT, "Number of epochs that each host is trained for."),
    ("--seed", ("run", "seed"), click.INT, "Random seed of the run.  [default: 0]"),
    (
        "--device",
        ("run", "device"),
        click.STRING,
        "Device of the hosts: cpu, cuda, cuda:0, auto, ...  [default: cpu]",
    ),
)


def config_options(function: Command) -> Command:
    """Adds the flags above, ``--config`` and ``--set``; the command receives them as keyword arguments."""
    options = [
        *(click.option(flag, type=kind, help=text) for flag, _, kind, text in FLAGS),
        click.option("--config", "config_file", type=PATH, metavar="FILE.toml", help="Read the config from a file."),
        click.option(
            "--set", "assignments", multiple=True, metavar="A.B=C", help="Set a config value; can be repeated."
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def build_tables(
    config_file: Path | None, assignments: tuple[str, ...], flags: dict[str, Any], extra: dict[tuple[str, str], Any]
) -> dict[str, Any]:
    """Returns valid config tables given by a file, then ``--set``, then flags; later ones take precedence.

    Args:
        flags: values of ``FLAGS`` by parameter name; None: not given.
        extra: further values by (section, key); None: not given.

    Raises:
        ConfigError: the input is invalid, or a run folder's config names a user-defined task or controller. Its code is
            run only if the command itself names it. A comparison ignores such a controller; its arms name theirs.
    """
    if flags["task"] is not None:  # before any config is made, which takes time
        require_task(flags["task"])
    controller = extra.get(("run", "controller"))
    if controller is not None:
        spec = ControllerSpec.of(controller)
        spec.require_known()
        spec.require_there()
    from esper.config import TrainingConfig, read_toml, set_dotted

    tables: dict[str, Any] = {}
    if config_file:
        tables = read_toml(config_file)
    for assignment in assignments:
        set_dotted(tables, assignment)
    given = {place: flags[flag.removeprefix("--").replace("-", "_")] for flag, place, _, _ in FLAGS}
    for (section, key), value in {**given, **extra}.items():
        put(tables, section, key, value)
    config = TrainingConfig.parse(tables)
    require_task(config.task.name)
    set_here = given_names(assignments, flags)
    named_here = "task.name" in set_here
    # A run puts an env.json beside its config.
    of_a_run = config_file is not None and (config_file.parent / "env.json").exists()
    if is_user_task(config.task.name) and not named_here and of_a_run:
        raise refuse_untrusted("task", config.task.name, str(config_file))
    place = ("run", "controller")
    controller, named_here = config.run.controller, extra.get(place) is not None or "run.controller" in set_here
    if of_a_run and ControllerSpec.of(controller).is_code and not named_here:
        if place in extra:
            raise refuse_untrusted("controller", controller, str(config_file))
        del tables["run"]["controller"]
    return tables


def check_early(
    config: TrainingConfig, given: Collection[str] = (), own_code: bool = False, processes: int | None = None
) -> None:
    """Raises ConfigError for what is wrong with a config on any machine, before torch is loaded, which takes seconds.

    Args:
        config: that of a run, or of an arm.
        given: values that the command names, as SECTION.KEY.
        own_code: whether code of the user is to run, which may register blueprints.
        processes: the number that hosts are spread over; None: one.
    """
    from esper.agents.needs import with_needs
    from esper.config import read_toml
    from esper.data.facts import check_known

    require_read(config, given)
    if config.track.to:
        from esper.run.tracking import check_libraries

        check_libraries(config)
    controller = config.run.controller
    spec = ControllerSpec.of(controller)
    if spec.kind == "schedule" and Path(spec.path).is_file():  # a pipe is read once, when it is followed
        read_toml(Path(spec.path), "schedule")
    check_known(with_needs(controller, config), own_code or spec.is_code, processes)


def given_names(assignments: Iterable[str], flags: dict[str, Any]) -> set[str]:
    """Returns the config values that a command itself names, as SECTION.KEY."""
    names = {assignment.partition("=")[0].strip() for assignment in assignments}
    for flag, place, _, _ in FLAGS:
        if flags[flag.removeprefix("--").replace("-", "_")] is not None:
            names.add(".".join(place))
    return names


def check_resume(
    given: Iterable[Any], flags: dict[str, Any], kind: str, allowed: str, option: str = "--resume FOLDER"
) -> None:
    """Raises ConfigError if ``option`` of a ``kind`` comes with options that are ``given``, or with ``flags``.

    A user-defined task is allowed: it has to be named again, because its code is loaded from no other name.
    """
    values = [*given, *(value for name, value in flags.items() if name != "task")]
    if flags["task"] is not None and not is_user_task(flags["task"]):
        values.append(flags["task"])
    if any(value is not None for value in values):
        raise ConfigError(
            f"{option} continues the {kind} with the settings it was started with; only {allowed}, and options of "
            "processes, can be given with it"
        )


def output_folder(out: Path | None, *parts: str, restarted: bool = False) -> Path:
    """Returns ``out``, or makes ``runs/PART-...-TIME``, with a number behind it if the name is taken; that goes with
    the command if it stays empty. A part that names a file, as a task or a controller may, becomes its stem.

    Raises ConfigError if ``out`` is not empty, unless the command was ``restarted`` and has written there.
    """
    if out is not None:
        if not restarted:
            require_empty(out)
        return out
    shorts = [ControllerSpec.of(part).short for part in parts]  # tasks in files are named as controllers are
    name = "-".join([*shorts, time.strftime("%Y%m%d-%H%M%S")])
    folder = new_subfolder(Path("runs"), name)
    click.get_current_context().call_on_close(partial(drop_if_empty, folder))
    return folder


def put(tables: dict[str, Any], section: str, key: str, value: Any) -> None:
    """Sets ``section.key`` unless ``value`` is None. A section that is not a table is left for ``parse()``."""
    table = tables.setdefault(section, {})
    if value is not None and isinstance(table, dict):
        table[key] = value


def check_json_file(file: Path | None) -> None:
    """Raises ConfigError unless ``--json`` names a new file in a folder that can be written, or is not given."""
    if file is None:
        return
    folder = file.absolute().parent
    if file.exists() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"--json {file}: give a new file in an existing folder that you can write to")
