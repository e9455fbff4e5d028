"""A small search over schedules for a task: which slots, in which order, with which blueprints.

    python benchmarks/search_schedules.py digits --seed 10000 --out best.toml

Every candidate plants its seeds one after the other, each as early as it is legal, blends with the fastest tempo and
keeps what its gates let through. All candidates grow the same hosts; the best few grow more hosts, and the best of
these by committed accuracy on validation images is written. Test images take no part.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Collection
from itertools import repeat
from pathlib import Path

import numpy as np

from esper.agents.script import ScheduleEntry, ScriptedController
from esper.config import TrainingConfig
from esper.core.action import ActionSpec
from esper.env.make import EnvMaker
from esper.env.slot_env import SlotVectorEnv
from esper.run.rollout import play_round

Plan = tuple[tuple[str, str], ...]
"""(slot, blueprint) in the order of planting."""


def candidates(
    spec: ActionSpec,
    at_once: Collection[str],
    max_seeds: int,
    mixed: int,
    draw: np.random.Generator,
) -> list[Plan]:
    """Returns every set of at most ``max_seeds`` slots, forwards and backwards, with one blueprint throughout, and
    ``mixed`` plans with different ones.

    Seeds of the blueprints ``at_once``, which need no trial, come first in every plan.
    """
    both_ways: set[tuple[str, ...]] = set()
    for n in range(1, max_seeds + 1):
        for order in itertools.combinations(spec.slots, n):
            both_ways |= {order, order[::-1]}
    orders = sorted(both_ways)
    pure: list[Plan] = []
    there_are = 0
    for order in orders:
        offers = [spec.offers(slot) for slot in order]
        there_are += math.prod(map(len, offers))
        common = set(spec.blueprints).intersection(*offers)
        usable = filter(common.__contains__, spec.blueprints)
        pure += [tuple(zip(order, repeat(blueprint))) for blueprint in usable]
    there_are -= len(pure)
    others: set[Plan] = set()
    while len(others) < min(mixed, there_are):
        order = orders[draw.integers(len(orders))]
        offers = [spec.offers(slot) for slot in order]
        plan = []
        for slot, names in zip(order, offers, strict=True):
            plan.append((slot, names[draw.integers(len(names))]))
        plan.sort(key=lambda seed: seed[1] not in at_once)
        others |= {tuple(plan)} - set(pure)
    return [*pure, *sorted(others)]


def schedule(plan: Plan, at_once: Collection[str]) -> list[ScheduleEntry]:
    """The plan as a schedule: what is due at epoch 0 is done as soon as it is legal and its gate would open."""
    entries: list[ScheduleEntry] = []
    for slot, blueprint in plan:
        if blueprint in at_once:
            entries.append(
                ScheduleEntry(epoch=0, op="GERMINATE", slot=slot, blueprint=blueprint)
            )
            continue
        entries.append(
            ScheduleEntry(
                epoch=0,
                op="GERMINATE",
                slot=slot,
                blueprint=blueprint,
                tempo=3,
                alpha_target=1.0,
            )
        )
        ops = ("ADVANCE", "ADVANCE", "ADVANCE", "FOSSILIZE")
        entries += [ScheduleEntry(epoch=0, op=op, slot=slot) for op in ops]
    return entries


def joining(env: SlotVectorEnv) -> set[str]:
    """Returns the blueprints whose seeds are a part of their host at once."""
    names = env.action_spec.blueprints
    return set(itertools.compress(names, env.backend.at_once))


def committed(env: SlotVectorEnv, plan: Plan, seed: int) -> float:
    """Mean committed validation accuracy of the hosts of one round, pp."""
    player = ScriptedController(
        schedule(plan, joining(env)), env.action_spec, env.layout, env.num_envs, seed
    )
    return float(play_round(env, player, seed).committed.mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task")
    parser.add_argument(
        "--seed",
        type=int,
        default=10_000,
        help="run seed of the hosts that are searched on",
    )
    parser.add_argument(
        "--hosts", type=int, default=4, help="hosts for every candidate"
    )
    parser.add_argument(
        "--mixed", type=int, default=60, help="candidates with different blueprints"
    )
    parser.add_argument(
        "--max-seeds",
        type=int,
        help="max seeds of a candidate; default: the number of slots",
    )
    parser.add_argument(
        "--slots", default="all", help="slots that may be used, separated by commas"
    )
    parser.add_argument(
        "--at-most",
        type=int,
        help="candidates that are played, drawn at random; default: all",
    )
    parser.add_argument("--finalists", type=int, default=6)
    parser.add_argument("--final-hosts", type=int, default=24)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()

    config = TrainingConfig.parse(
        {
            "task": {"name": arguments.task},
            "run": {"controller": "schedule"},
            "env": {"slots": arguments.slots.split(",")},
        }
    )
    maker = EnvMaker.of(config)
    env, final = maker.make(arguments.hosts), maker.make(arguments.final_hosts)
    spec = env.action_spec
    draw = np.random.default_rng(arguments.seed)
    max_seeds = arguments.max_seeds or len(spec.slots)
    plans = candidates(spec, joining(env), max_seeds, arguments.mixed, draw)
    if arguments.at_most is not None and arguments.at_most < len(plans):
        kept = draw.choice(len(plans), arguments.at_most, replace=False)
        plans = [plans[index] for index in sorted(kept)]
    found = []
    for number, plan in enumerate(plans, 1):
        found.append((committed(env, plan, arguments.seed), plan))
        print(f"{number}/{len(plans)}  {found[-1][0]:.2f} %  {plan}", flush=True)
    found.sort(reverse=True)
    print("finalists")
    finals = []
    for _, plan in found[: arguments.finalists]:
        finals.append((committed(final, plan, arguments.seed + 1), plan))
        print(f"{finals[-1][0]:.2f} %  {plan}", flush=True)
    accuracy, best = max(finals)
    tables = []
    for entry in schedule(best, joining(env)):
        lines = ["[[action]]"]
        for key, value in entry.model_dump(exclude_unset=True).items():
            lines.append(f"{key} = {value!r}")
        tables.append("\n".join(lines) + "\n")
    header = f"# Best of {len(plans)} schedules: {accuracy:.2f} % committed validation accuracy, seed {arguments.seed}.\n"
    arguments.out.write_text(
        header + "\n" + "\n".join(tables).replace("'", '"'), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
