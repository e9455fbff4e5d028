"""Names of slots and blueprints that a config chooses, checked without loading torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from esper.errors import ConfigError, did_you_mean


def stands_for(name: str, slot: str) -> bool:
    """Returns whether ``name`` is that of ``slot``, of its row or column, or "all"."""
    return name in ("all", slot, *re.findall(r"[rc]\d+", slot))


def choose_slots(names: Sequence[str], possible: Sequence[str]) -> set[str]:
    """Returns the slots of ``possible`` that ``names`` stand for, see :func:`stands_for`.

    Raises ConfigError, listing the possible slots, for a name that stands for none of them, or without names.
    """
    wanted: set[str] = set()
    unknown = []
    for name in dict.fromkeys(names):
        slots = [slot for slot in possible if stands_for(name, slot)]
        wanted.update(slots)
        if not slots:
            unknown.append(name)
    problem = ""
    if not names:
        problem = "name one or more slots"
    elif unknown:
        problem = f"the hosts have no slot {', '.join(unknown)}"
    if problem:
        raise ConfigError(f"{problem}; possible: {', '.join(possible)}")
    return wanted


def choose_blueprints(
    wanted: tuple[str, ...] | None,
    known: tuple[str, ...],
    where: str,
    misfit: Callable[[str], str | None] = lambda _name: None,
    default: tuple[str, ...] | None = None,
) -> tuple[str, ...]:
    """Returns the blueprints that a controller may plant: ``wanted`` (``env.blueprints``), or ``default`` if it is
    None, which are all that are ``known`` if that is None as well.

    Raises ConfigError listing the known names if one is unknown or given twice, or if the list is empty.
    ``where`` names the topology or task in the message. ``misfit`` returns the reason that a blueprint is not on offer,
    or None for a name that no blueprint has.
    """
    if not known:
        raise ConfigError(f"no blueprint is registered for {where}, so nothing could be planted")
    if wanted is None:
        return known if default is None else default
    names = dict.fromkeys(wanted)
    problems = []
    for name in names:
        if name in known:
            continue
        reason = misfit(name)
        if reason is None:
            problems.append(f"unknown {name!r}{did_you_mean(name, known)}")
        else:
            problems.append(f"{name!r} fits in no slot ({reason})")
    problems += [f"{name!r} is given more than once" for name in names if wanted.count(name) > 1]
    if not wanted:
        problems = ["it is empty; a run that plants nothing has run.controller = 'none'"]
    if problems:
        raise ConfigError(f"env.blueprints: {'; '.join(problems)}; known for {where}: {', '.join(known)}")
    return wanted
