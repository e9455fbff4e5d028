"""Seeds: their stages, gates, alpha, blending, blueprints, and the slots they live in."""
