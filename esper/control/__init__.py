"""Controllers that do not learn: a rule, a script, chance, and doing nothing."""
