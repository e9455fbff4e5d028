"""Controllers that do not learn: heuristic, scripted, random, and no growth."""
