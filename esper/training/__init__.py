"""Training hosts: the step, lanes, evaluation, gradient statistics, and the governor."""
