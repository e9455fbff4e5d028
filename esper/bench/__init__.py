"""`esper-bench`: what the compiled operators are worth, measured against named baselines in the same run."""
