"""Seeds: stages, gates, alpha, blending, blueprints and slots."""
