"""Training hosts: the step, executors, evaluation, gradient statistics, and the governor."""
