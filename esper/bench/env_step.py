"""Cases of `env-step`: the share of an epoch that is neither training nor validation of hosts."""

from collections.abc import Iterator
from dataclasses import replace

from esper.agents.ppo.agent import PPOAgent
from esper.bench.case import BenchArgs, BenchCase, Sizes
from esper.bench.fixtures import VALIDATION, full_telemetry, growth_env, image_task
from esper.bench.train_epoch import FULL
from esper.env.vector_env import GrowthVectorEnv
from esper.rollout.rollout import Rollout
from esper.rollout.threads import one_thread

NAME = "env-step"
SIZES = Sizes("ENVSxBATCHxWIDTH", ((4, 128, 8),), seconds=40.0)

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
        began = self.rollout.seconds
        before = self.env.phase_seconds
        self.rollout.step()
        seconds = self.rollout.seconds - began
        # Seconds of the phases add up over a run.
        spent = {
            phase: 100 * (total - before.get(phase, 0.0)) / seconds for phase, total in self.env.phase_seconds.items()
        }
        everything = 100 - sum(spent.get(phase, 0.0) for phase in HOSTS)
        self.shares["policy"].append(spent["act"])
        self.shares["telemetry"].append(spent["telemetry"])
        self.shares["rest"].append(everything - spent["act"] - spent["telemetry"])
        return everything


def comparisons(args: BenchArgs) -> Iterator[BenchCase]:
    """Yields the whole share, which has a bar, then its parts from the same steps."""
    for device, size in SIZES.of(args):
        envs, batch, width = size
        samples = max(1, FULL // batch) * batch
        validation = VALIDATION
        if args.quick:
            samples = batch
            validation = batch
        bar = None
        if size in SIZES.default and not args.quick:
            bar = 1.0

        task = image_task(samples, width, device, validation)
        with full_telemetry() as hub, growth_env(task, envs, batch, hub.emit) as env, one_thread():
            steps = Steps(env)
            whole = BenchCase(
                case=f"{NAME}: all but training and validation of hosts",
                size=f"E {envs}, batch {batch}, width {width}, {samples:,} samples",
                device=device,
                baseline=f"a budget of {BUDGET:g} %",
                run=steps.step,
                run_baseline=lambda: BUDGET,
                bar=bar,
                unit="%",
            )
            yield whole
            for part, shares in steps.shares.items():
                yield replace(
                    whole,
                    case=f"{NAME}: {part} only",
                    baseline="the same budget",
                    run=shares.pop,
                    bar=None,
                    turns=len(shares),
                )
