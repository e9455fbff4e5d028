"""The policy and value network: a recurrent encoder and autoregressive action heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.config import PPOConfig
from esper.core.action import ALPHA_TARGETS, HEADS, RELEVANT, ActionSpec, Op
from esper.core.observation import BASE, PER_CHOICE, PER_SLOT, split

Masks = Mapping[str, Tensor]
State = tuple[Tensor, Tensor]
"""Hidden and cell state of the LSTM, each [E, H]."""
FREE_HEADS = HEADS[3:]
"""Heads after op, slot and blueprint; given those three, they are independent of one another."""

CHOICE_INPUTS = ("price", "size", "size_share", "layers", "spatial", "elementwise")
"""Inputs of the network about a seed that could be planted."""
_NAMES = [entry.name for entry in PER_CHOICE]
CHOICE_PLACES = torch.tensor([_NAMES.index(name) for name in CHOICE_INPUTS])
"""Places of these inputs among the entries of a (slot, blueprint)."""


def _relevance() -> Tensor:
    matters = torch.zeros(len(Op), len(HEADS), dtype=torch.bool)
    matters[:, HEADS.index("op")] = True
    for op, heads in RELEVANT.items():
        for head in heads:
            matters[op, HEADS.index(head)] = True
    return matters


RELEVANCE = _relevance()
"""Bool [ops, heads]: whether a head matters for an op. The op head always does."""


@dataclass(frozen=True)
class Decision:
    """Actions int64 [N, 8] with their joint log-probability [N], and the normalised entropies of the heads, [N, 8] and
    0 for a head that does not matter for the op."""

    action: Tensor
    log_prob: Tensor
    entropies: Tensor


WAVES = 4
"""Number of cosines, including the constant, that encode a slot's place."""


def place_waves(slots: int) -> Tensor:
    """cos(π k (i + ½) / S) for slot i in row-major order and k < ``WAVES``: [S, WAVES].

    Places are relative, from the first slot to the last, so that hosts with different numbers of slots agree on which
    slots are early, in the middle and late.
    """
    places = (torch.arange(slots) + 0.5) / slots
    return torch.cos(math.pi * places[:, None] * torch.arange(WAVES))


def fourier(waves: Tensor) -> Tensor:
    """Returns the matrix [WAVES, S] that maps values of S slots to their Fourier coefficients, the mean first.

    ``waves`` is :func:`place_waves` of S slots, [S, WAVES].
    """
    weights = waves.T / len(waves)
    weights[1:] *= 2
    return weights.contiguous()


class Scene(NamedTuple):
    """Inputs of the heads: the context [..., width], and embeddings of slots [..., S, part] and of the seeds that
    could be planted [..., S, B, part]."""

    context: Tensor
    slots: Tensor
    choices: Tensor

    def rows(self) -> Scene:
        """Joins the leading axes [T, E]."""
        return Scene(
            context=self.context.flatten(0, 1),
            slots=self.slots.flatten(0, 1),
            choices=self.choices.flatten(0, 1),
        )


class SequenceLSTM(nn.Module):
    """A one-layer LSTM whose state is reset at the start of an episode.

    Sequences are split at the steps in which any env starts an episode, and each piece runs through the fused kernel.
    Without such steps it is as fast as a plain LSTM.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.lstm = nn.LSTM(size, size)

    def forward(
        self,
        x: Tensor,
        state: State,
        starts: Tensor,
    ) -> tuple[Tensor, State]:
        """Maps x [T, E, H] to outputs [T, E, H] and the state after the last step.

        ``state`` is the state before the first step; ``starts`` bool [T, E] marks the first steps of episodes.
        """
        begins = starts.any(dim=1).nonzero().flatten().tolist()
        cuts = sorted({0, *begins, len(x)})
        hidden, cell = state
        outputs = []
        for begin, end in pairwise(cuts):
            fresh = starts[begin][:, None]
            hidden = torch.where(fresh, 0.0, hidden)
            cell = torch.where(fresh, 0.0, cell)
            # The kernel's states have an axis of layers in front.
            before = (hidden[None].contiguous(), cell[None].contiguous())
            out, (h, c) = self.lstm(x[begin:end], before)
            outputs.append(out)
            hidden = h[0]
            cell = c[0]
        return torch.cat(outputs), (hidden, cell)

    def initial_state(self, envs: int, device: torch.device) -> State:
        """Returns the state of ``envs`` envs before their first episode."""
        zeros = torch.zeros(envs, self.size, device=device)
        return zeros, zeros.clone()


class PolicyNetwork(nn.Module):
    """Observation → features → LayerNorm → LSTM (residual) → autoregressive heads and a value.

    No weight depends on the number of slots or of blueprints. One shared encoder embeds each seed that could be
    planted, from its size, its price and what it is built of, never from its name. Another one embeds each slot: its
    features, its place (as waves), its seed, and the mean of the seeds that could be planted there. The trunk sees
    these embeddings as a function of place, through its first Fourier coefficients, which are lossless for up to
    ``WAVES`` slots; the slot and blueprint heads score the embeddings themselves. The op head also reads the mean
    embedding of the seeds that may be planted now, zeros without any.
    """

    def __init__(self, spec: ActionSpec, config: PPOConfig) -> None:
        """``config`` has the width, and the preferences of the initial policy (``prior``, ``prior_*``)."""
        super().__init__()
        width = config.width
        part = max(16, width // 4)
        waves = place_waves(len(spec.slots))
        self.waves: Tensor
        self.coefficients: Tensor
        self.register_buffer("waves", waves, persistent=False)  # [S, WAVES]
        self.register_buffer("coefficients", fourier(waves), persistent=False)  # [WAVES, S]
        self.choice_encoder = nn.Sequential(
            _two_layers(len(CHOICE_INPUTS), part, part),
            nn.Tanh(),
        )
        self.ops = nn.Embedding(len(Op), part)
        features = len(PER_SLOT) - 1  # the last entry is an index, which is embedded
        self.slot_encoder = nn.Sequential(
            nn.Linear(features + 2 * part + WAVES, part),
            nn.Tanh(),
        )
        self.trunk = _two_layers(len(BASE) + WAVES * part, width, width)
        self.norm = nn.LayerNorm(width)
        self.memory = SequenceLSTM(width)
        self.op_head = _two_layers(width + part, width, len(Op))
        self.slot_query = _two_layers(width + part, width, part)
        self.blueprint_query = _two_layers(width + 2 * part, width, part)
        self.free_sizes = spec.sizes[3:]
        self.free_heads = _two_layers(width + 3 * part, width, sum(self.free_sizes))
        self.value_head = _two_layers(width, width, 1)
        self._initialise(config)

    def _initialise(self, config: PPOConfig) -> None:
        """Sets orthogonal weights with gain √2 (0.01 for the policy's outputs, 1 for the value and the LSTM), and zero
        biases except for the prior."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight, math.sqrt(2))
                nn.init.zeros_(module.bias)
        for name, parameter in self.memory.named_parameters():
            if "weight" in name:
                nn.init.orthogonal_(parameter)
            else:
                nn.init.zeros_(parameter)
        outputs = (self.op_head, self.slot_query, self.blueprint_query, self.free_heads)
        for head in outputs:
            nn.init.orthogonal_(head[-1].weight, 0.01)  # type: ignore[arg-type]
        nn.init.orthogonal_(self.value_head[-1].weight, 1.0)  # type: ignore[arg-type]
        self._set_prior(config)

    @torch.no_grad()
    def _set_prior(self, config: PPOConfig) -> None:
        """Sets the biases of the ops and of the alpha targets to the preferences of the initial policy."""
        # It advances seeds and leaves them alone. A uniform initial policy prunes nearly every seed, or leaves it at an
        # alpha below 1, which cannot be fossilized, before it pays off; what the agent then learns is not to plant any.
        logits = {
            Op.SET_ALPHA_TARGET: config.prior_retarget,
            Op.PRUNE: config.prior_prune,
            Op.FOSSILIZE: config.prior_fossilize,
            Op.ADVANCE: config.prior_advance,
        }
        ops = [config.prior * logits.get(op, 0.0) for op in Op]
        free: list[float] = []
        for head, size in zip(FREE_HEADS, self.free_sizes, strict=True):
            if head == "alpha_target":
                free += [config.prior * config.prior_full_alpha * (target == 1.0) for target in ALPHA_TARGETS]
            else:
                free += [0.0] * size
        self.op_head[-1].bias.copy_(torch.tensor(ops))  # type: ignore[operator]
        self.free_heads[-1].bias.copy_(torch.tensor(free))  # type: ignore[operator]

    def encode(
        self,
        observation: Tensor,
        state: State,
        starts: Tensor,
    ) -> tuple[Scene, State]:
        """Returns the inputs of the heads, [T, E, ...], and the state after the last step.

        ``observation`` [T, E, D] is normalised, ``state`` is the recurrent state before the first step, and ``starts``
        bool [T, E] marks the first steps of episodes.
        """
        base, slots, choices = split(observation, len(self.waves))
        described = choices[..., CHOICE_PLACES.to(choices.device)]  # [T, E, S, B, C]
        embeddings = self._embed(described)

        # Each slot: its entries, the embeddings of its seed and of those that it could have, and its place.
        planted = slots[..., -1].long()  # 0 for none
        seed = row_at(embeddings, (planted - 1).clamp(min=0))
        seed = seed * (planted > 0)[..., None]
        offered = embeddings.mean(dim=-2)
        places = self.waves.expand(*slots.shape[:-1], -1)
        inputs = (slots[..., :-1], seed, offered, places)
        slot_embeddings = self.slot_encoder(torch.cat(inputs, dim=-1))

        summary = (self.coefficients @ slot_embeddings).flatten(-2)  # [T, E, WAVES · part]
        features = self.trunk(torch.cat((base, summary), dim=-1))
        seen = self.norm(features)
        remembered, state = self.memory(seen, state, starts)
        scene = Scene(
            context=seen + remembered,
            slots=slot_embeddings,
            choices=embeddings,
        )
        return scene, state

    def _embed(self, described: Tensor) -> Tensor:
        """Returns the embeddings [T, E, S, B, part] of the seeds that could be planted, of entries [T, E, S, B, C].

        Within an episode, entries stay as they are, so one step usually stands for all T.
        """
        first = described[:1]
        if bool((described == first).all()):
            embeddings: Tensor = self.choice_encoder(first)
            return embeddings.expand(*described.shape[:-1], -1)
        return self.choice_encoder(described)  # type: ignore[no-any-return]

    def value(self, context: Tensor) -> Tensor:
        """Returns V(s) [...] for contexts [..., width]."""
        return self.value_head(context).squeeze(-1)  # type: ignore[no-any-return]

    def _op_scores(self, scene: Scene, masks: Masks) -> Tensor:
        """Returns the logits of ops, [N, ops], by the context and by the seeds that may be planted."""
        plantable = masks["slot_blueprint"] & masks["op_slot"][:, Op.GERMINATE, :, None]  # [N, S, B]
        count = plantable.sum(dim=(1, 2)).clamp(min=1)
        offered = (scene.choices * plantable[..., None]).sum(dim=(1, 2)) / count[:, None]
        inputs = torch.cat((scene.context, offered), dim=-1)
        return self.op_head(inputs)  # type: ignore[no-any-return]

    def decide(
        self,
        scene: Scene,
        masks: Masks,
        action: Tensor | None = None,
        uniforms: Tensor | None = None,
    ) -> Decision:
        """Decides N rows: replays ``action`` [N, 8], or samples with ``uniforms`` [N, 8], or takes the most likely.

        The parts of ``scene`` are [N, ...], and so are ``masks``, the legal choices by name.

        p(a) = p(op) · p(slot | op) · p(blueprint | op, slot) · Π p(head | op, slot, blueprint) over the heads that
        matter for the op; the other heads are 0.
        """
        context = scene.context
        rows = torch.arange(len(context), device=context.device)
        choices = _Choices(action, uniforms)
        op = choices.add(self._op_scores(scene, masks), masks["op"])

        known = torch.cat((context, self.ops(op)), dim=-1)
        scores = _scores(self.slot_query(known), scene.slots)
        slot = choices.add(scores, masks["op_slot"][rows, op])

        known = torch.cat((known, scene.slots[rows, slot]), dim=-1)
        seeds = scene.choices[rows, slot]
        scores = _scores(self.blueprint_query(known), seeds)
        affordable = masks["slot_blueprint"][rows, slot]
        affordable = affordable | ~affordable.any(dim=-1, keepdim=True)  # rows whose op needs no blueprint
        blueprint = choices.add(scores, affordable)

        known = torch.cat((known, seeds[rows, blueprint]), dim=-1)
        logits = self.free_heads(known).split(self.free_sizes, dim=-1)
        for head, scores in zip(FREE_HEADS, logits, strict=True):
            choices.add(scores, masks[head])
        return choices.decision()


class _Choices:
    """The choices of N rows, head by head in the order of ``HEADS``: replayed from ``action`` [N, 8], or sampled with
    ``uniforms`` [N, 8], or the most likely ones."""

    def __init__(self, action: Tensor | None, uniforms: Tensor | None) -> None:
        self.action = action
        self.uniforms = uniforms
        self.chosen: list[Tensor] = []
        self.log_probs: list[Tensor] = []
        self.entropies: list[Tensor] = []

    def add(self, logits: Tensor, legal: Tensor) -> Tensor:
        """Chooses for the next head from its ``logits`` and ``legal`` options [N, n]; returns the choices [N]."""
        head = len(self.chosen)
        options = MaskedCategorical(logits, legal)
        if self.action is not None:
            choice = self.action[:, head]
        elif self.uniforms is not None:
            choice = options.sample(self.uniforms[:, head])
        else:
            choice = options.mode()
        op = self.chosen[0] if self.chosen else choice
        matters = RELEVANCE.to(choice.device)[op, head]
        choice = torch.where(matters, choice, 0)
        self.chosen.append(choice)
        self.log_probs.append(torch.where(matters, options.log_prob(choice), 0.0))
        self.entropies.append(torch.where(matters, options.normalized_entropy(), 0.0))
        return choice

    def decision(self) -> Decision:
        """Returns the choices of all heads."""
        return Decision(
            action=torch.stack(self.chosen, dim=-1),
            log_prob=torch.stack(self.log_probs, dim=-1).sum(dim=-1),
            entropies=torch.stack(self.entropies, dim=-1),
        )


def row_at(values: Tensor, place: Tensor) -> Tensor:
    """Returns row ``place`` [...] of ``values`` [..., N, M], [..., M]."""
    index = place[..., None, None].expand(*place.shape, 1, values.shape[-1])
    return values.gather(-2, index)[..., 0, :]


def _two_layers(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.Tanh(),
        nn.Linear(hidden, outputs),
    )


def _scores(query: Tensor, keys: Tensor) -> Tensor:
    """query [N, d] · keys [N, K, d] / √d → [N, K]."""
    products = (keys @ query[:, :, None])[:, :, 0]
    return products / math.sqrt(query.shape[-1])


MASKED_LOGIT = -1e4
"""Logit of an illegal choice: low enough for probability 0 in float32, but finite, so that gradients stay finite."""


class MaskedCategorical:
    """A categorical distribution over n options for each of N rows.

    ``logits`` are [N, n]. ``legal`` bool [N, n] marks the options that may be chosen, at least one in every row.
    """

    def __init__(self, logits: Tensor, legal: Tensor) -> None:
        self.legal = legal
        masked = torch.where(legal, logits.float(), MASKED_LOGIT)
        self.log_probs = torch.log_softmax(masked, dim=-1)  # [N, n]

    def sample(self, uniforms: Tensor) -> Tensor:
        """Samples choices [N] by inverting the CDF at ``uniforms`` [N] in [0, 1); every choice is legal."""
        probs = self.log_probs.exp().masked_fill(~self.legal, 0.0)
        cumulative = probs.cumsum(dim=-1)
        total = cumulative[:, -1:]  # 1, but for rounding
        chosen = (cumulative <= uniforms[:, None] * total).sum(dim=-1)
        # Rounding may also lead past the last legal option.
        illegal_after = self.legal.flip(-1).int().argmax(dim=-1)
        last_legal = self.legal.shape[-1] - 1 - illegal_after
        return torch.minimum(chosen, last_legal)

    def mode(self) -> Tensor:
        """Returns the most likely choice [N]."""
        return self.log_probs.argmax(dim=-1)

    def log_prob(self, choice: Tensor) -> Tensor:
        """log p(choice) [N]."""
        return self.log_probs.gather(-1, choice[:, None])[:, 0]

    def normalized_entropy(self) -> Tensor:
        """−Σ p ln p / ln(number of legal options) [N], in [0, 1]; 0 if only one choice is legal."""
        plogp = self.log_probs.exp() * self.log_probs
        plogp = torch.where(self.legal, plogp, 0.0)
        options = self.legal.sum(dim=-1)
        highest = options.clamp(min=2).float().log()
        return -plogp.sum(dim=-1) / highest * (options > 1)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): an input bit flips half of the output bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def counter_uniforms(
    run_seed: int,
    env: NDArray[np.int64],
    episode: NDArray[np.int64],
    step: NDArray[np.int64],
    draws: int,
) -> NDArray[np.float64]:
    """Returns uniform numbers in [0, 1), float64 [E, draws], keyed by (run seed, env, episode, step, draw).

    An env's numbers depend only on its own counters; ``env``, ``episode`` and ``step`` are int64 [E].
    """
    with np.errstate(over="ignore"):
        one = np.uint64(1)
        golden = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / the golden ratio
        key = _mix(np.full(len(env), run_seed, dtype=np.uint64) + golden)
        for counter in (env, episode, step):
            key = _mix(key * golden + counter.astype(np.uint64) + one)
        draw = np.arange(draws, dtype=np.uint64)
        values = _mix(key[:, None] + golden * (draw + one))
    # The upper 53 bits, as many as float64 holds.
    return (values >> np.uint64(11)).astype(np.float64) * 2.0**-53
