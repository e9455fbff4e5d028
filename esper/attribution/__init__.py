"""Credit assignment to seeds: counterfactual contributions, interactions and Shapley values."""
