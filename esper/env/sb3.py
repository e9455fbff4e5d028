"""The former place of ``SB3VecEnv``, which is an example now."""

raise ImportError("esper.env.sb3 is gone; copy HostsVecEnv from examples/sb3_maskable_ppo.py")
