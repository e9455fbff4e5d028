"""One run, one comparison and one grown host, for tests that only read folders."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from functools import cached_property
from pathlib import Path

GROWS = """
[[action]]
epoch = 0
op = "GERMINATE"
slot = "r0c0"
blueprint = "conv_light"
tempo = 3

[[action]]
epoch = 1
op = "ADVANCE"
slot = "r0c0"

[[action]]
epoch = 3
op = "ADVANCE"
slot = "r0c0"

[[action]]
epoch = 5
op = "ADVANCE"
slot = "r0c0"

[[action]]
epoch = 6
op = "FOSSILIZE"
slot = "r0c0"
"""
"""A schedule that keeps one seed in a host of seven epochs or more, if the gates are open."""

OPEN_GATES = {"min_gradient_health": 0.0, "trial_standard_errors": 1000.0}


class Recorded:
    """Finished folders, each written when it is first asked for.

    Tests share the folders: a test that changes files copies the folder first.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @cached_property
    def run(self) -> Path:
        """A run on digits: three rounds of learning, a final comparison of two pairs."""
        from esper import Experiment
        from tests.run.run_helpers import learning

        config = learning(evaluation_pairs=2, ppo={"validate_every": 2})
        Experiment(config, self.root / "run").run()
        return self.root / "run"

    @cached_property
    def comparison(self) -> Path:
        """A comparison of none, random and heuristic on twelve pairs of simulated hosts."""
        from esper.cli.group import group

        arms = ("--arm", "none", "--arm", "random", "--arm", "heuristic")
        size = ("--pairs", "12", "--envs", "4", "--episode-length", "30")
        folder = self.root / "comparison"
        command = ["compare", *arms, *size, "--task", "planted", "--out", str(folder)]
        with redirect_stdout(io.StringIO()):
            group.main(command, standalone_mode=False)
        return folder

    @cached_property
    def grown(self) -> Path:
        """A run on digits whose two hosts keep a conv_light in r0c0; its ``best_host`` is the stem of a grown host."""
        from esper import Experiment, TrainingConfig

        schedule = self.root / "grows.toml"
        schedule.write_text(GROWS)
        config = TrainingConfig.parse(
            {
                "run": {"rounds": 1, "controller": f"schedule:{schedule}"},
                "task": {"samples_per_epoch": 128},
                "env": {
                    "n_envs": 2,
                    "episode_length": 8,
                    "baseline_episodes": 1,
                    "gates": OPEN_GATES,
                },
            }
        )
        Experiment(config, self.root / "grown").run()
        return self.root / "grown"
