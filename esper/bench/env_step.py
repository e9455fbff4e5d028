"""Cases of `env-step`: the share of an epoch that is neither training nor validation of hosts."""

from collections.abc import Iterator
from dataclasses import replace

from esper.bench.case import BenchArgs, BenchCase, Sizes
from esper.bench.fixtures import VALIDATION, full_telemetry, growth_env, image_task
from esper.bench.train_epoch import FULL
from esper.env.vector_env import GrowthVectorEnv
from esper.ppo.agent import PPOAgent
from esper.rollout.rollout import Rollout
from esper.rollout.threads import one_thread

NAME = "env-step"
SIZES = Sizes("ENVSxBATCHxWIDTH", ((4, 128, 8),), seconds=60.0)

BUDGET = 5.0  # % of an epoch
HOSTS = ("stage", "train", "validate")  # phases that are work of the hosts


class Steps:
    """Steps of envs under an untrained agent, as in a run."""

    def __init__(self, env: GrowthVectorEnv) -> None:
        self.env = env
        self.agent = PPOAgent(env.action_spec, env.layout, env.num_envs, env.config.ppo)
        self.rollout = Rollout(env, self.agent, learner=self.agent)
        self.rollout.begin(seed=0)
        self.rollout.step()  # warm-up
        self.shares: dict[str, list[float]] = {"policy": [], "telemetry": [], "rest": []}
        """Parts of the time of each step that were not the hosts', in % of the step."""

    def step(self) -> float:
        """Performs one step of all envs and returns the share of its time, in %, that was not the hosts'.

        If all episodes have ended, it first begins new ones.
        """
        if self.rollout.over:
            self.agent.buffer.clear()
            self.rollout.begin(seed=0)
        seconds, phases = self.rollout.seconds, self.env.phase_seconds
        self.rollout.step()
        seconds = self.rollout.seconds - seconds
        spent = {name: 100 * (end - phases.get(name, 0.0)) / seconds for name, end in self.env.phase_seconds.items()}
        everything = 100 - sum(spent.get(name, 0.0) for name in HOSTS)
        rest = everything - spent["act"] - spent["telemetry"]
        for name, share in (("policy", spent["act"]), ("telemetry", spent["telemetry"]), ("rest", rest)):
            self.shares[name].append(share)
        return everything


def comparisons(args: BenchArgs) -> Iterator[BenchCase]:
    """Yields the whole share, which has a bar, then its parts from the same steps."""
    for device, size in SIZES.of(args):
        envs, batch, width = size
        samples, validation = max(1, FULL // batch) * batch, VALIDATION
        if args.quick:
            samples = validation = batch
        task = image_task(samples, width, device, validation)
        with full_telemetry() as hub, growth_env(task, envs, batch, hub.emit) as env, one_thread():
            steps = Steps(env)
            whole = BenchCase(
                f"{NAME}: all but training and validation of hosts",
                f"E {envs}, batch {batch}, width {width}, {samples:,} samples",
                device,
                f"a budget of {BUDGET:g} %",
                steps.step,
                lambda: BUDGET,
                bar=1.0 if size in SIZES.default and not args.quick else None,
                unit="%",
            )
            yield whole
            for part, shares in steps.shares.items():
                case, baseline = f"{NAME}: {part} only", "the same budget"
                yield replace(whole, case=case, baseline=baseline, run=shares.pop, bar=None, turns=len(shares))
