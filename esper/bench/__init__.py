"""`esper-bench`: performance of Esper, measured against named baselines in the same run."""


def _modules(*commands: str) -> dict[str, str]:
    """Names of the modules of cases, which have NAME, SIZES and comparisons(args), by command.

    They are imported only when a case runs: --help must not load torch.
    """
    return {command: f"{__name__}.{command.replace('-', '_')}" for command in commands}


OPERATORS = _modules(
    "adamw",
    "cross-entropy",
    "grad-stats",
    "norm-relu-pool",
    "sgd",
    "stage-batch",
)
RUNS = _modules(
    "end-to-end",
    "env-step",
    "ppo-update",
    "telemetry-overhead",
    "train-epoch",
    "train-task",
    "validate",
)
CASES = OPERATORS | RUNS
