"""`esper-bench`: performance of Esper, measured against named baselines in the same run."""

# Case -> the module that has it in CASES. Modules are imported only when a case runs: --help must not load torch.
CASES = {
    "adamw": "operators",
    "cross-entropy": "operators",
    "grad-stats": "operators",
    "norm-relu-pool": "operators",
    "sgd": "operators",
    "stage-batch": "operators",
    "env-step": "training",
    "grow-task": "training",
    "train-epoch": "training",
    "train-task": "training",
    "validate": "training",
    "workers": "training",
}
REMOVED = {
    "end-to-end": "grow-task, a whole step of hosts that grow",
    "ppo-update": "esper run: metrics.csv has the seconds of each update",
    "telemetry-overhead": "env-step: one of its rows is the share of telemetry",
}
"""Cases of older versions, and what to use instead."""
