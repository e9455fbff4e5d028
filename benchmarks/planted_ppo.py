"""PPO on `planted`: learning curves of some seeds, and what each reaches on hosts that it never saw.

    python -m benchmarks.planted_ppo --seeds 5 --out benchmarks/results/planted_ppo

Writes OUT.json with every curve and score, and OUT.png. The score is 0 for the random controller and 1 for the best
return that a search over the law finds; returns are discounted.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import esper
from benchmarks.planted_score import PlantedScale, planted_scale
from esper.agents.heuristic import HeuristicController
from esper.env.planted import PlantedVectorEnv
from esper.files.policy import find_policy
from esper.files.system_info import describe_environment
from esper.run.rollout import play_round

HELD_OUT = 999


def train(seed: int, rounds: int, scale: PlantedScale) -> dict[str, Any]:
    """One agent from scratch: its score after every round of training, and at the end on held-out hosts."""
    config = esper.TrainingConfig.parse(
        {
            "task": {"name": "planted"},
            "run": {"seed": seed, "rounds": rounds, "evaluation_pairs": 10},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        esper.Experiment(config, Path(folder) / "run").run()
        seconds = time.perf_counter() - start
        events = [
            json.loads(line)
            for line in (Path(folder) / "run" / "events.jsonl").read_text().splitlines()
        ]
        env = PlantedVectorEnv()
        finals = {}
        for kind, greedy in (("likeliest", True), ("sampled", False)):
            policy = find_policy(f"{folder}/run").controller(env, HELD_OUT, greedy)
            finals[kind] = scale.score(
                float(play_round(env, policy, HELD_OUT).returns.mean())
            )
    curve = [
        scale.score(event["mean_return"])
        for event in events
        if event["event"] == "RoundCompleted"
    ]
    steps = [
        event["env_steps"] for event in events if event["event"] == "PolicyUpdated"
    ]
    return {
        "seed": seed,
        "seconds": seconds,
        "env_steps": steps,
        "training": curve,
        **finals,
    }


def plot(runs: list[dict[str, Any]], heuristic: float, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for run in runs:
        axes.plot(
            [steps / 1000 for steps in run["env_steps"]],
            run["training"],
            label=f"seed {run['seed']}",
        )
    axes.axhline(0.9, color="black", linewidth=0.8, linestyle="--", label="0.9")
    axes.axhline(
        heuristic, color="grey", linewidth=0.8, linestyle=":", label="heuristic"
    )
    axes.set(
        xlabel="thousand env steps",
        ylabel="score of the training round",
        title="PPO on planted",
    )
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    scale = planted_scale()
    env = PlantedVectorEnv()
    rule = HeuristicController(env.action_spec, env.layout, env.num_envs)
    heuristic = scale.score(float(play_round(env, rule, HELD_OUT).returns.mean()))
    print(
        f"random {scale.random:.3f}, best {scale.best:.3f}; heuristic scores {heuristic:.3f}",
        flush=True,
    )
    runs = []
    for seed in range(arguments.seeds):
        runs.append(train(seed, arguments.rounds, scale))
        last = runs[-1]
        print(
            f"seed {seed}: likeliest {last['likeliest']:.3f}, sampled {last['sampled']:.3f}, {last['seconds']:.0f} s",
            flush=True,
        )
    environment = describe_environment()
    environment["modules"] = sorted(environment["modules"])
    facts = {
        "random": scale.random,
        "best": scale.best,
        "heuristic": heuristic,
        "runs": runs,
        "environment": environment,
    }
    arguments.out.with_suffix(".json").write_text(
        json.dumps(facts, indent=1) + "\n", encoding="utf-8"
    )
    plot(runs, heuristic, arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
