"""`esper-bench`: performance of the compiled operators, measured against named baselines in the same run."""
