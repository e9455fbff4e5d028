"""The core of growing, in arrays and modules: actions, observations, the lifecycle of seeds, blueprints, rewards."""
