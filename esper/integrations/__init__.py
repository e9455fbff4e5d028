"""Growth in the trainers of other libraries. Each module imports its library, which need not be installed."""
