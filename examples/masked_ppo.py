"""PPO with action masks in one file: it learns to grow the simulated hosts of `planted`, through Gymnasium's API.

python examples/masked_ppo.py [ROUNDS [SEED]]
"""

import sys

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from esper.env.flat_action import FlatActionVector

ROUNDS = 40
if len(sys.argv) > 1:
    ROUNDS = int(sys.argv[1])
SEED = 0
if len(sys.argv) > 2:
    SEED = int(sys.argv[2])
HOSTS, EPOCHS = 64, 25  # a round is one episode of each host, 1,600 steps
PASSES, BATCH, RATE = 6, 400, 2e-3
GAMMA, LAMBDA, CLIP, ENTROPY, MAX_NORM = 0.995, 0.97, 0.2, 0.02, 0.5

torch.manual_seed(SEED)
torch.set_num_threads(1)
envs = FlatActionVector(
    gymnasium.make_vec(
        "esper.env:esper/Growth-v0",
        num_envs=HOSTS,
        task="planted",
        episode_length=EPOCHS,
        min_prune_age=EPOCHS,  # no pruning, and gates that open by themselves: what is left is what to plant and keep
        auto_advance=["G1", "G2", "G3"],
    )
)
inputs, actions = envs.single_observation_space.shape[0], envs.single_action_space.n


class Agent(nn.Module):
    """Two networks, and the statistics that normalise their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(
                nn.Linear(inputs, 128),
                nn.Tanh(),
                nn.Linear(128, 128),
                nn.Tanh(),
                nn.Linear(128, outputs),
            )
            for outputs in (actions, 1)
        )
        nn.init.zeros_(self.actor[-1].weight)
        self.seen, self.mean, self.variance = (
            1e-4,
            torch.zeros(inputs),
            torch.ones(inputs),
        )

    def learn_scale(self, x: Tensor) -> None:
        """Adds observations [N, inputs] to the running mean and variance."""
        share = len(x) / (self.seen + len(x))
        change = x.mean(0) - self.mean
        self.variance = (
            (1 - share) * self.variance
            + share * x.var(0, False)
            + share * (1 - share) * change**2
        )
        self.mean, self.seen = self.mean + share * change, self.seen + len(x)

    def forward(
        self, x: Tensor, legal: Tensor
    ) -> tuple[torch.distributions.Categorical, Tensor]:
        """Returns the policy and the values [N] for observations [N, inputs]; illegal actions have probability 0."""
        x = ((x - self.mean) / (self.variance + 1e-8).sqrt()).clamp(-10, 10)
        logits = self.actor(x).masked_fill(~legal, -1e9)
        return torch.distributions.Categorical(logits=logits), self.critic(x).squeeze(1)


agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=RATE, eps=1e-5)


def tensors(observation: np.ndarray, info: dict) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(observation), torch.from_numpy(
        info["action_mask"].astype(bool)
    )


@torch.no_grad()
def play(
    observation: np.ndarray, info: dict, greedy: bool
) -> tuple[list[tuple[Tensor, ...]], np.ndarray, dict]:
    """Plays one episode in all envs: returns the steps, and what the next episodes begin with."""
    steps = []
    for _ in range(EPOCHS):
        x, legal = tensors(observation, info)
        policy, value = agent(x, legal)
        action = policy.probs.argmax(1) if greedy else policy.sample()
        observation, reward, terminated, truncated, info = envs.step(action.numpy())
        # Episodes end together, at the horizon, which is part of the observation: nothing follows to be estimated.
        assert not truncated.any()
        going_on = torch.from_numpy(~terminated).float()
        steps.append(
            (
                x,
                legal,
                action,
                policy.log_prob(action),
                value,
                torch.from_numpy(reward).float(),
                going_on,
            )
        )
    return steps, observation, info


def discounted(steps: list[tuple[Tensor, ...]]) -> float:
    """Returns the mean discounted return of the episodes."""
    return float(
        sum(GAMMA**t * reward.mean() for t, (*_, reward, _) in enumerate(steps))
    )


def learn(steps: list[tuple[Tensor, ...]]) -> None:
    x, legal, action, old, value, reward, going_on = (
        torch.stack(column) for column in zip(*steps, strict=True)
    )
    advantage, following, later = (
        torch.zeros_like(value),
        torch.zeros(HOSTS),
        torch.zeros(HOSTS),
    )
    for t in reversed(range(EPOCHS)):
        error = reward[t] + GAMMA * going_on[t] * following - value[t]
        advantage[t] = later = error + GAMMA * LAMBDA * going_on[t] * later
        following = value[t]
    target = advantage + value
    flat = [
        column.flatten(0, 1) for column in (x, legal, action, old, advantage, target)
    ]
    for _ in range(PASSES):
        for rows in torch.randperm(len(flat[0])).split(BATCH):
            x, legal, action, old, advantage, target = (column[rows] for column in flat)
            policy, value = agent(x, legal)
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            ratio = (policy.log_prob(action) - old).exp()
            gain = torch.minimum(
                ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage
            ).mean()
            loss = (
                0.5 * (value - target).square().mean()
                - gain
                - ENTROPY * policy.entropy().mean()
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), MAX_NORM)
            optimizer.step()
    agent.learn_scale(
        torch.stack([x for x, *_ in steps]).flatten(0, 1)
    )  # afterwards: the ratio above starts at 1


observation, info = envs.reset(seed=SEED)
for number in range(1, ROUNDS + 1):
    steps, observation, info = play(observation, info, greedy=False)
    learn(steps)
    if number == 1 or number % 5 == 0:
        print(
            f"round {number:3}, {number * HOSTS * EPOCHS:6} steps: mean return {discounted(steps):6.3f}"
        )

# The hosts of the next round are new; the env keeps what it has found seeds to be worth, as it does in a run. A reset
# with another seed would forget that, and the agent would have to explore again.
steps, *_ = play(observation, info, greedy=True)
print(
    f"test: mean return {discounted(steps):.3f} of {HOSTS} hosts that it has not seen"
)
