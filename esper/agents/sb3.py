"""The former place of ``SB3Controller``, which is an example now."""

raise ImportError("esper.agents.sb3 is gone; copy ModelController from examples/sb3_controller.py")
