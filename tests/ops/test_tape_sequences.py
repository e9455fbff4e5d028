"""Layers of sequences on a tape, forward and backward, beside PyTorch's over random sizes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from esper.core.blend import running_mean
from esper.core.blueprints.transformer import AttentionSeed
from esper.hosts.transformer import (
    AttentionFromProjections,
    Block,
    CausalAttention,
    TiedHead,
    TokenEmbedding,
)
from esper.ops.tape import Tape, Unsupported
from esper.training import native_layers  # noqa: F401  registers the layers

BOUND = 1e-11


def sizes(seed: int) -> tuple[int, int, int]:
    """Returns random numbers of sequences, positions and features: groups that are not full, and odd sizes."""
    numbers = random.Random(seed)
    return numbers.randint(1, 5), numbers.randint(2, 67), numbers.randint(1, 67)


class RunningMean(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return running_mean(h)


def write(tape: Tape, module: nn.Module) -> None:
    if isinstance(module, RunningMean):
        tape.emit("running_mean", 0, tape.shapes[0], [tape.length])
    else:
        tape.add(module, 0)


def differences(module: nn.Module, x: Tensor) -> list[float]:
    """Differences between a tape and eager PyTorch for x [B, T, C]: of the output and all gradients, relative to the
    largest number of each, or to 1."""
    eager = copy.deepcopy(module)
    tape = Tape((x.shape[2], 1, 1), x.shape[1])
    write(tape, module)
    program = tape.program()
    leaf = x.clone().requires_grad_()
    expected = eager(leaf)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    assert leaf.grad is not None

    input_gradient = torch.full_like(x.flatten(0, 1), 9)
    output = program.run(x.flatten(0, 1), gradient.flatten(0, 1), input_gradient)
    pairs = [
        (output.view_as(expected), expected),
        (input_gradient.view_as(x), leaf.grad),
    ]
    for mine, other in zip(module.parameters(), eager.parameters(), strict=True):
        if other.grad is not None:  # the layer has it
            number = program.gradient_of[tape.tensor(mine, learns=True)]
            pairs.append((program.gradients[number], other.grad))
    found = []
    for mine, other in pairs:
        size = other.detach().abs().max().clamp(min=1)
        found.append(float((mine - other.detach()).abs().max() / size))
    return found


def projections(heads: int, width: int) -> nn.Module:
    return AttentionFromProjections(CausalAttention(heads * width, heads))


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "attention": lambda c: CausalAttention(4 * c, 4),
    "attention of one head": lambda c: CausalAttention(c, 1),
    "attention of wider heads": lambda c: CausalAttention(c, 2, head_width=c + 3),
    "a seed's attention": lambda c: AttentionSeed(c, causal=True),
    "attention to all positions": lambda c: AttentionSeed(c, causal=False),
    "block": lambda c: Block(c, 1),
    "running mean": lambda c: RunningMean(),
    "linear": lambda c: nn.Linear(c, c + 5),
    "layer norm": lambda c: nn.LayerNorm(c),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_sequences_equals_pytorch(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    sequences, length, channels = sizes(seed + 10 * len(name))
    module = LAYERS[name](channels).double()
    inputs = 4 * channels if name == "attention" else channels
    x = torch.randn(sequences, length, inputs, dtype=torch.float64)
    assert max(differences(module, x)) < BOUND


@pytest.mark.parametrize("length", [2, 15, 16, 17, 32, 67])
@pytest.mark.parametrize("width", [1, 16, 33])
def test_heads_of_any_width_attend_in_sequences_of_any_length(
    length: int, width: int
) -> None:
    torch.manual_seed(length)
    x = torch.randn(3, length, 3 * 2 * width, dtype=torch.float64)
    assert max(differences(projections(2, width).double(), x)) < BOUND


class Language(nn.Module):
    def __init__(self, vocabulary: int, width: int, block: int) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(vocabulary, width, block)
        self.norm = nn.LayerNorm(width)
        self.head = TiedHead(self.embedding)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(tokens)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_embeddings_learn_from_their_tokens_and_from_a_tied_head(
    seed: int, frozen: bool
) -> None:
    torch.manual_seed(seed)
    sequences, length, width = sizes(seed)
    model = Language(7 + seed, width, length + seed).double()
    model.embedding.token.weight.requires_grad_(not frozen)
    tokens = torch.randint(0, 7 + seed, (sequences, length))
    tape = Tape((1, 1, 1), length)
    tape.add_all([model.embedding, model.norm, model.head], 0)
    program = tape.program()
    expected = model(tokens)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    for _ in range(2):  # a second pass overwrites what the first has left
        output = program.run(tokens.reshape(-1, 1).double(), gradient.flatten(0, 1))
    torch.testing.assert_close(output.view_as(expected), expected)
    learning = [p for p in model.parameters() if p.requires_grad]
    assert len(program.gradients) == len(learning)
    for parameter, found in zip(program.parameters, program.gradients, strict=True):
        torch.testing.assert_close(found, parameter.grad)


@pytest.mark.parametrize("token", [-1.0, 7.0, float("nan")])
def test_a_token_outside_of_the_vocabulary_is_refused(token: float) -> None:
    tape = Tape((1, 1, 1), 2)
    tape.add(TokenEmbedding(7, 4, 2), 0)
    with pytest.raises(IndexError, match="is not between 0 and 6"):
        tape.program().run(torch.tensor([[0.0], [token]]))


def test_a_batch_with_a_part_of_a_sequence_is_refused() -> None:
    tape = Tape((4, 1, 1), 3)
    tape.add(CausalAttention(4, 1), 0)
    with pytest.raises(ValueError, match="a sequence is not whole"):
        tape.program().run(torch.zeros(7, 4))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_position_that_is_not_finite_spoils_those_that_see_it_and_no_other_sequence(
    bad: float,
) -> None:
    torch.manual_seed(0)
    module = CausalAttention(8, 2)
    x = torch.randn(3, 21, 8)
    x[1, 5] = bad
    tape = Tape((8, 1, 1), 21)
    tape.add(module, 0)
    gradient = torch.zeros_like(x.flatten(0, 1))
    output = tape.program().run(
        x.flatten(0, 1), torch.ones_like(x.flatten(0, 1)), gradient
    )
    finite = output.view(3, 21, 8).isfinite().all(dim=2)
    assert not finite[1, 5:].any()
    assert finite[0].all()
    assert finite[2].all()
    learned = gradient.view(3, 21, 8).isfinite().all(dim=2)
    assert not learned[1, :6].any()
    assert learned[0].all()
    assert learned[2].all()


def test_gelu_in_float32_is_exact_to_a_few_units_in_the_last_place() -> None:
    x = torch.cat([torch.linspace(-12, 12, 4000), torch.tensor([1e4, -1e4, 1e-30, 0])])
    x = x.view(-1, 1).requires_grad_()
    exact = nn.functional.gelu(x.double())
    (slope,) = torch.autograd.grad(exact.sum(), x)
    tape = Tape((1, 1, 1))
    tape.add(nn.GELU(), 0)
    gradient = torch.empty_like(x.detach())
    output = tape.program().run(x, torch.ones_like(x), gradient)
    torch.testing.assert_close(
        output.view(-1, 1).double(), exact.detach(), rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(gradient, slope, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(4), nn.AdaptiveAvgPool2d(1), nn.MaxPool2d(1)]
)
def test_layers_across_positions_have_no_form_for_sequences(layer: nn.Module) -> None:
    with pytest.raises(Unsupported, match="in a sequence has no compiled form"):
        Tape((4, 1, 1), 3).add(layer, 0)


def wrong_programs() -> list[tuple[str, str, int, int]]:
    """Layers and columns that are set to a wrong number, with a word of the message."""
    return [
        ("attention", "wrong shape", 4, 3),
        ("attention", "no head", 6, 0),
        ("embedding", "wrong size", 6, 9),
        ("embedding", "no layer shares", 7, 1),
        ("linear", "no weight", 4, -1),
        ("running mean", "have a length", 4, 0),
    ]


@pytest.mark.parametrize(("name", "words", "column", "number"), wrong_programs())
def test_a_wrong_program_of_sequences_is_refused(
    name: str, words: str, column: int, number: int
) -> None:
    tape = Tape((1 if name == "embedding" else 4, 1, 1), 3)
    modules: dict[str, nn.Module] = {
        "attention": CausalAttention(4, 2),
        "embedding": TokenEmbedding(7, 4, 3),
        "linear": nn.Linear(4, 2),
        "running mean": RunningMean(),
    }
    write(tape, modules[name])
    row = 1 if name == "attention" else 0
    tape.code[row][column] = number
    program = tape.program()
    with pytest.raises(RuntimeError, match=words):
        program.run(torch.zeros(3, tape.shapes[0][0]))
