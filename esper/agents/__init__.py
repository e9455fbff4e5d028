"""Controllers that do not learn: heuristic, at plateaus, scripted, random, and no growth."""
