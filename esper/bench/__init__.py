"""`esper-bench`: performance of Esper, measured against named baselines in the same run."""

_OPERATORS = ("adamw", "cross-entropy", "grad-stats", "norm-relu-pool", "sgd", "stage-batch")
_RUNS = ("end-to-end", "env-step", "ppo-update", "telemetry-overhead", "train-epoch", "train-task", "validate")

# Command -> module with NAME, SIZES and comparisons(args). Imported only when it runs: --help must not load torch.
OPERATORS, RUNS = ({case: f"{__name__}.{case.replace('-', '_')}" for case in cases} for cases in (_OPERATORS, _RUNS))
CASES = OPERATORS | RUNS
