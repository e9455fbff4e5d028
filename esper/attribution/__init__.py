"""Which seed did it: counterfactual contributions and interactions."""
