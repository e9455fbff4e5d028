"""`esper-bench`: performance of Esper, measured against named baselines in the same run."""

# Case -> the module that has it in CASES. Modules are imported only when a case runs: --help must not load torch.
CASES = {
    "adamw": "operators",
    "cross-entropy": "operators",
    "grad-stats": "operators",
    "norm-relu-pool": "operators",
    "sgd": "operators",
    "stage-batch": "operators",
    "grow-task": "training",
    "train-epoch": "training",
    "train-task": "training",
    "validate": "training",
    "workers": "training",
}
