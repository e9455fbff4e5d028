"""Play plans to widen hosts that differ, fit an advisor to some of them, and judge it on the others.

    python -m benchmarks.exam play FOLDER            # plays every plan: 12 CPU minutes without the wide parts
    python -m benchmarks.exam judge FOLDER           # fits advisors and policies, and prints a table for each part
    python -m benchmarks.exam final FOLDER           # plays and judges contexts that nothing is chosen by
    python -m benchmarks.exam declines FOLDER        # prints how much advisors grow where nothing pays
    python -m benchmarks.exam map FOLDER             # draws the sizes that the shipped advisor chooses
    python -m benchmarks.exam ship FOLDER            # writes the advisor that comes with Esper

Tables of people and `fashion_mnist` must be there: see benchmarks/uci_tables.py, and `esper tasks`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path

import numpy as np
import torch

from benchmarks.exam_fit import fit
from benchmarks.exam_play import facts_of, law_of_region, play, wide_law
from benchmarks.exam_rules import PlanTable, ceiling, halving, returns_of
from esper.agents.advisor import ENTRIES, WEIGHTS, Advisor, shipped
from esper.core.arrays import Floats, Ints
from esper.core.sizing import FACTORS
from esper.exam.context import Context, Law
from esper.exam.sources import (
    HELD_OUT_IMAGES,
    HELD_OUT_TABLES,
    IMAGES,
    TABLES,
    made_names,
)

KNOWN = (*IMAGES, *TABLES)
HELD_OUT = (*HELD_OUT_IMAGES, *HELD_OUT_TABLES)
MADE = (*made_names(images=True), *made_names(images=False))
PARTS: dict[str, tuple[Law, int, int, tuple[int, ...]]] = {
    "known": (Law(KNOWN), 1, 500, (0,)),
    "made": (Law(MADE), 2, 500, (0,)),
    "known_wide": (wide_law(KNOWN), 6, 150, (0,)),
    "made_wide": (wide_law(MADE), 7, 150, (0,)),
    "dev": (Law(KNOWN), 3, 120, (10, 11, 12)),
    "region": (law_of_region(KNOWN), 4, 120, (10, 11, 12)),
    "held_out": (Law(HELD_OUT, left_out=None), 5, 160, (10, 11, 12)),
    "final": (Law(KNOWN), 8, 120, (10, 11, 12)),
    "final_region": (law_of_region(KNOWN), 9, 120, (10, 11, 12)),
    "final_held_out": (Law(HELD_OUT, left_out=None), 10, 160, (10, 11, 12)),
}
"""By name: the law, the seed of the draws, the number of contexts, and the seeds of their hosts."""
LEARN = ("known", "made", "known_wide", "made_wide")
JUDGE = ("dev", "region", "held_out")
FINAL = ("final", "final_region", "final_held_out")
CALLS = Path(__file__).with_name("results") / "exam.calls"
"""A line for each time that the final parts were judged."""
PICTURE = Path(__file__).with_name("results") / "exam.png"
SHARE = 0.3
"""Part of the epochs that halving tries each width for."""
ADVISORS = 5
KEYS = ((), ("price",), ("width",), ("price", "width"), ("price", "width", "samples"))


def play_part(folder: Path, part: str) -> None:
    """Plays a part and writes contexts and accuracies."""
    law, seed, count, seeds = PARTS[part]
    rng = np.random.default_rng(seed)
    contexts = [law.draw(rng) for _ in range(count)]
    tried = np.zeros(0)
    if part in (*JUDGE, *FINAL):
        tried = play(contexts, seeds, SHARE)
    accuracies = play(contexts, seeds)
    (folder / f"{part}.json").write_text(
        json.dumps([asdict(context) for context in contexts])
    )
    np.savez(folder / f"{part}.npz", accuracies=accuracies, tried=tried)
    print(f"{part}: {count} contexts of {len(seeds)} hosts for each plan", flush=True)


def read_part(folder: Path, part: str) -> tuple[list[Context], Floats, Floats]:
    """Returns contexts, accuracies [contexts, plans, seeds, 2], and those of short trainings."""
    contexts = [
        Context(**fields)
        for fields in json.loads((folder / f"{part}.json").read_text())
    ]
    with np.load(folder / f"{part}.npz") as arrays:
        return contexts, arrays["accuracies"], arrays["tried"]


def logs(folder: Path, parts: Sequence[str]) -> tuple[list[Context], Floats]:
    """Returns the contexts of several parts, and test accuracies [contexts, plans, 1]."""
    contexts = []
    tests = []
    for part in parts:
        of_part, accuracies, _ = read_part(folder, part)
        contexts += of_part
        tests.append(accuracies[..., 1].mean(axis=2, keepdims=True))
    return contexts, np.concatenate(tests)


def fitted(folder: Path, parts: Sequence[str], seed: int) -> Advisor:
    contexts, accuracies = logs(folder, parts)
    gains = []
    for context, of_plans in zip(contexts, accuracies[..., 0], strict=True):
        gains.append(of_plans[: len(context.factors)] - of_plans[0])
    return fit(list(map(facts_of, contexts)), gains, seed)


class Policy(torch.nn.Module):
    """Chooses a plan by a softmax over the scores of all plans, of what an advisor sees and the plan's cost."""

    def __init__(self, contexts: Sequence[Context], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        x, _ = entries_of(contexts)
        self.mean = x.mean(dim=(0, 1))
        self.deviation = x.std(dim=(0, 1)).clamp(min=1e-3)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(x.shape[-1], 64),
            torch.nn.GELU(),
            torch.nn.Linear(64, 64),
            torch.nn.GELU(),
            torch.nn.Linear(64, 1),
        )

    def forward(self, x: torch.Tensor, offered: torch.Tensor) -> torch.Tensor:
        """Returns log-probabilities [N, plans] for entries [N, plans, entries]."""
        scores = self.net(((x - self.mean) / self.deviation).clamp(-3, 3))[..., 0]
        return scores.masked_fill(~offered, -1e9).log_softmax(dim=-1)

    def choose(self, contexts: Sequence[Context]) -> Ints:
        with torch.no_grad():
            return self(*entries_of(contexts)).argmax(dim=-1).numpy()


def entries_of(contexts: Sequence[Context]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the entries of all plans, [N, plans, entries], and whether they are on offer, [N, plans]."""
    x = np.zeros((len(contexts), len(FACTORS), ENTRIES + 1))
    offered = np.zeros((len(contexts), len(FACTORS)), dtype=bool)
    for row, context in enumerate(contexts):
        facts = facts_of(context)
        plans = facts.plans()
        number = len(facts.parameters)
        offered[row, :number] = True
        x[row, 1:number, :-1] = plans
        if number > 1:
            alone = plans[0].copy()
            alone[-4:] = [0, alone[0], 0, alone[9]]
            x[row, 0, :-1] = alone
        x[row, :number, -1] = np.log2(0.1 + facts.costs(context.price))
    return torch.from_numpy(x).float(), torch.from_numpy(offered)


def learned_policy(
    folder: Path, parts: Sequence[str], seed: int, rate: float
) -> Policy:
    """Climbs the expected return of a policy on logged plans, by its exact gradient; ``rate`` 0 learns nothing."""
    contexts, accuracies = logs(folder, parts)
    policy = Policy(contexts, seed)
    if not rate:
        return policy
    x, offered = entries_of(contexts)
    returns = torch.from_numpy(returns_of(contexts, accuracies)[..., 0]).float()
    gains = (returns - returns[:, :1]) / 10
    optimizer = torch.optim.AdamW(policy.parameters(), rate, weight_decay=1e-2)
    order = torch.randperm(len(contexts))
    judged, learned = order[: len(order) // 5], order[len(order) // 5 :]
    best, kept = -np.inf, policy.state_dict()
    for step in range(3_000):
        if step % 25 == 0:
            with torch.no_grad():
                chances = policy(x[judged], offered[judged]).exp()
            value = float((chances * gains[judged]).sum(dim=-1).mean())
            if value > best:
                best = value
                kept = {name: v.clone() for name, v in policy.state_dict().items()}
        rows = learned[torch.randint(len(learned), (256,))]
        logs_of = policy(x[rows], offered[rows])
        chances = logs_of.exp()
        entropy = -(chances * logs_of).sum(dim=-1).mean()
        loss = -(chances * gains[rows]).sum(dim=-1).mean() - 0.01 * entropy
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    policy.load_state_dict(kept)
    return policy


def judge(folder: Path, judged: Sequence[str] = JUDGE) -> None:
    """Prints what each arm returns beside the best single plan, for each part."""
    known = logs(folder, ["known"])
    tables = {keys: PlanTable.fit(keys, known[0], returns_of(*known)) for keys in KEYS}
    advisors = {
        parts: [fitted(folder, parts, seed) for seed in range(ADVISORS)]
        for parts in (("known",), ("made",), ("known", "made"), LEARN)
    }
    policies = {
        rate: [learned_policy(folder, LEARN, seed, rate) for seed in range(ADVISORS)]
        for rate in (0.0, 1e-3)
    }
    for part in judged:
        contexts, accuracies, tried = read_part(folder, part)
        returns = returns_of(contexts, accuracies[..., 1])
        rows = np.arange(len(contexts))

        def of(plans: Ints, returns: Floats = returns, rows: Ints = rows) -> Floats:
            return np.asarray(returns.mean(axis=2)[rows, plans])

        def mean_of(members: Sequence[Ints]) -> Floats:
            return np.mean([of(plans) for plans in members], axis=0)

        arms = {"none": of(np.zeros_like(rows))}
        for keys in KEYS[1:]:
            arms[f"best plan by {' × '.join(keys)}"] = of(tables[keys].choose(contexts))
        arms[f"halving, {SHARE:g} of the epochs"] = mean_of(
            [halving(contexts, tried[:, :, seed, 0]) for seed in range(tried.shape[2])]
        )
        for parts, members in advisors.items():
            arms[f"advisor from {' and '.join(parts)}"] = mean_of(
                [choices(advisor, contexts) for advisor in members]
            )
        for rate, policies_at in policies.items():
            arms[f"policy gradient at rate {rate:g}"] = mean_of(
                [policy.choose(contexts) for policy in policies_at]
            )
        table(part, of(tables[()].choose(contexts)), ceiling(returns), arms)


def final(folder: Path) -> None:
    """Plays and judges the final parts, and notes it."""
    for part in FINAL:
        if not (folder / f"{part}.npz").exists():
            play_part(folder, part)
    version = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    with CALLS.open("a") as calls:
        calls.write(f"{date.today()} {version.stdout.strip()}\n")
    judge(folder, FINAL)


def declines(folder: Path) -> None:
    """Prints the parameters that advisors end with where the best plan is to grow nothing, by price."""
    advisors = [fitted(folder, LEARN, seed) for seed in range(ADVISORS)]
    for part in JUDGE:
        contexts, accuracies, _ = read_part(folder, part)
        means = returns_of(contexts, accuracies[..., 1]).mean(axis=2)
        alone = means.argmax(axis=1) == 0
        prices = np.array([context.price for context in contexts])
        doublings = np.zeros((ADVISORS, len(contexts)))
        for row, context in enumerate(contexts):
            facts = facts_of(context)
            for seed, advisor in enumerate(advisors):
                chosen = advisor.choose(facts, context.price)
                grown = facts.parameters[chosen] / facts.parameters[1]
                doublings[seed, row] = np.log2(grown)
        for least in (0.0, 4.0):
            rows = alone & (prices >= least)
            times = 2 ** doublings[:, rows].mean()
            print(
                f"{part}, price {least:g} or more: {times:.2f}, {rows.sum()} contexts"
            )


def draw_map(folder: Path) -> None:
    """Draws the multiple of the widths that is best in each context of `dev`, and that the shipped advisor chooses."""
    from matplotlib import pyplot as plt

    contexts, accuracies, _ = read_part(folder, "dev")
    best = returns_of(contexts, accuracies[..., 1]).mean(axis=2).argmax(axis=1)
    panels = {
        "best of five plans": best,
        "chosen by the advisor": choices(shipped(), contexts),
    }
    widths = np.array([context.width for context in contexts], dtype=float)
    jitter = np.random.default_rng(0).uniform(0.9, 1.1, len(widths))
    samples = [context.samples for context in contexts]
    figure, axes = plt.subplots(
        1, 2, figsize=(9, 3.6), sharey=True, layout="constrained"
    )
    for axis, (title, plans) in zip(axes, panels.items(), strict=True):
        dots = axis.scatter(
            widths * jitter,
            samples,
            c=plans,
            cmap=plt.get_cmap("viridis", len(FACTORS)),
            vmin=-0.5,
            vmax=len(FACTORS) - 0.5,
        )
        axis.set(xscale="log", yscale="log", title=title, xlabel="width at first")
        axis.set_xticks(ticks := sorted(set(widths)), [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
    axes[0].set_ylabel("training samples")
    axes[0].set_yticks(ticks := (40, 100, 200, 400, 800), list(map(str, ticks)))
    bar = figure.colorbar(dots, ax=axes, ticks=range(len(FACTORS)))
    bar.ax.set_yticklabels([f"×{factor}" for factor in FACTORS])
    figure.savefig(PICTURE, dpi=110)


def table(part: str, single: Floats, best: Floats, arms: dict[str, Floats]) -> None:
    """Prints the returns [contexts] of arms beside that of the best single plan, and the advisor's beside theirs."""
    gap = best - single
    shipped = arms[f"advisor from {' and '.join(LEARN)}"]
    print(f"\n{part}, {len(single)} contexts, pp beside the best single plan\n")
    print("| arm | pp | of the gap | the advisor of all minus it |\n|---|---|---|---|")
    for name, returns in {"ceiling": best, **arms}.items():
        more = returns - single
        share = more.mean() / gap.mean()
        print(
            f"| {name} | {interval(more)} | {share:.2f} | {interval(shipped - returns)} |"
        )


def interval(values: Floats) -> str:
    """Returns the mean with its 95 % interval over contexts."""
    error = 1.96 * values.std(ddof=1) / np.sqrt(len(values))
    return f"{values.mean():+.2f} ± {error:.2f}"


def choices(advisor: Advisor, contexts: Sequence[Context]) -> Ints:
    chosen = [
        context.factors.index(advisor.choose(facts_of(context), context.price))
        for context in contexts
    ]
    return np.array(chosen)


def ship(folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(fitted(folder, LEARN, 0).state_dict(), WEIGHTS)
    print(f"{WEIGHTS}: {WEIGHTS.stat().st_size:,} bytes")


COMMANDS: dict[str, Callable[[Path], None]] = {
    "judge": judge,
    "final": final,
    "declines": declines,
    "map": draw_map,
    "ship": ship,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("play", *COMMANDS))
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=f"parts to play: {', '.join(PARTS)}; all by default",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.what == "play":
        for part in args.parts or PARTS:
            play_part(args.folder, part)
        return
    COMMANDS[args.what](args.folder)


if __name__ == "__main__":
    main()
