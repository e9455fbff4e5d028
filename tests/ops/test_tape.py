"""Layers of a tape, forward and backward, beside PyTorch's over random sizes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from esper.ops.tape import Tape, Unsupported

Shape = tuple[int, ...]
Make = Callable[[int], nn.Module]


def chain(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


IMAGES: dict[str, Make] = {
    "convolution 1": lambda c: nn.Conv2d(c, c + 3, 1),
    "convolution 3": lambda c: nn.Conv2d(c, c + 1, 3, padding=1, bias=False),
    "convolution 5": lambda c: nn.Conv2d(c, 7, 5, padding=2),
    "without padding": lambda c: nn.Conv2d(c, 2, 2),
    "stride 2": lambda c: nn.Conv2d(c, c + 2, 3, stride=2, padding=1),
    "stride 3, kernel 2": lambda c: nn.Conv2d(c, 5, 2, stride=3, padding=1),
    "dilation": lambda c: nn.Conv2d(c, 4, 3, padding=2, dilation=2),
    "rectangle": lambda c: nn.Conv2d(c, 3, (1, 3), stride=(2, 1), padding=(0, 1)),
    "depthwise": lambda c: nn.Conv2d(c, c, 3, padding=1, groups=c),
    "depthwise, stride 2": lambda c: nn.Conv2d(c, c, 3, stride=2, padding=1, groups=c),
    "batch norm": lambda c: nn.BatchNorm2d(c),
    "batch norm, cumulative": lambda c: nn.BatchNorm2d(c, momentum=None),
    "batch norm, no statistics": lambda c: nn.BatchNorm2d(c, track_running_stats=False),
    "batch norm, not affine": lambda c: nn.BatchNorm2d(c, affine=False),
    "batch norm behind a bias": lambda c: chain(nn.Conv2d(c, 3, 1), nn.BatchNorm2d(3)),
    "batch norm, relu": lambda c: chain(nn.BatchNorm2d(c), nn.ReLU()),
    "group norm": lambda c: nn.GroupNorm(1, c),
    "group norm, groups": lambda c: nn.GroupNorm(c, c),
    "group norm, relu": lambda c: chain(nn.GroupNorm(1, c), nn.ReLU()),
    "norm, relu and pool in one": lambda c: chain(
        nn.BatchNorm2d(c), nn.ReLU(), nn.MaxPool2d(2)
    ),
    "convolution larger than its input": lambda c: nn.Conv2d(c, 2, 7, padding=4),
    "max pool": lambda c: nn.MaxPool2d(2),
    "max pool, overlapping": lambda c: nn.MaxPool2d(3, stride=2, padding=1),
    "max pool, ceiling": lambda c: nn.MaxPool2d(2, ceil_mode=True),
    "average pool": lambda c: nn.AvgPool2d(2),
    "average pool, ceiling": lambda c: nn.AvgPool2d(
        3, stride=2, padding=1, ceil_mode=True
    ),
    "average pool, without padding": lambda c: nn.AvgPool2d(
        3, 2, 1, count_include_pad=False
    ),
    "global mean": lambda c: chain(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    "flatten": lambda c: chain(nn.Conv2d(c, 2, 1), nn.Flatten()),
    "relu": lambda c: nn.ReLU(),
    "leaky relu": lambda c: nn.LeakyReLU(0.1),
    "elu": lambda c: nn.ELU(0.7),
    "gelu": lambda c: nn.GELU(),
    "gelu, tanh": lambda c: nn.GELU("tanh"),
    "silu": lambda c: nn.SiLU(),
    "tanh": lambda c: nn.Tanh(),
    "sigmoid": lambda c: nn.Sigmoid(),
}

VECTORS: dict[str, Make] = {
    "linear": lambda c: nn.Linear(c, c + 5),
    "linear, no bias": lambda c: nn.Linear(c, 3, bias=False),
    "layer norm": lambda c: nn.LayerNorm(c),
    "batch norm of vectors": lambda c: nn.BatchNorm1d(c),
    "mlp": lambda c: chain(nn.Linear(c, 16), nn.SiLU(), nn.Linear(16, 3)),
}


def on_tape(network: nn.Module, shape: Shape) -> tuple[Tape, int]:
    channels, height, width = (*shape, 1, 1)[:3]
    tape = Tape((channels, height, width))
    return tape, tape.add(network, 0)


def both_ways(
    network: nn.Module, x: Tensor, gradient: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Returns what a tape and eager PyTorch compute: the output, all gradients, and buffers."""
    eager = copy.deepcopy(network)
    tape, _ = on_tape(network, tuple(x.shape[1:]))
    program = tape.program()
    leaf = x.clone().requires_grad_()
    expected = eager(leaf)
    expected.backward(gradient)

    input_gradient = torch.full_like(x, 9)
    output = program.run(x, gradient, input_gradient, network.training)
    assert leaf.grad is not None
    pairs = [(output.view_as(expected), expected), (input_gradient, leaf.grad)]
    for mine, other in zip(network.parameters(), eager.parameters(), strict=True):
        assert other.grad is not None
        number = program.gradient_of[tape.tensor(mine, learns=True)]
        pairs.append((program.gradients[number], other.grad))
    return pairs + list(zip(network.buffers(), eager.buffers(), strict=True))


def differences(network: nn.Module, x: Tensor) -> list[float]:
    """Returns the differences between both ways, relative to the largest number of each, or to 1."""
    gradient = torch.randn_like(copy.deepcopy(network)(x))
    pairs = both_ways(network, x, gradient)
    found = []
    for mine, other in pairs:
        size = other.detach().double().abs().max().clamp(min=1)
        found.append(
            float((mine.double() - other.detach().double()).abs().max() / size)
        )
    return found


SMALLEST = {"without padding": 2, "max pool": 2, "average pool": 2}
SMALLEST["norm, relu and pool in one"] = 2
"""Sides of images, where a layer needs more than one position."""


BOUNDS = {torch.float32: 1e-3, torch.float64: 1e-10}
"""Double runs without the vectors of the machine, which only float shows."""


def sizes(seed: int, smallest: int = 1) -> tuple[int, int, int, int]:
    """Returns random numbers of samples, channels, rows and columns: groups that are not full, odd and small sizes."""
    numbers = random.Random(seed)
    return (
        numbers.choice([2, 3, 15, 16, 17, 31, 33, 40]),
        numbers.randint(1, 67),
        numbers.randint(smallest, 9),
        numbers.randint(smallest, 9),
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [*IMAGES, *VECTORS])
def test_a_layer_equals_pytorch(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    smallest = SMALLEST.get(name, 1)
    samples, channels, height, width = sizes(seed + 10 * len(name), smallest)
    make = IMAGES.get(name) or VECTORS[name]
    shape = (channels, height, width) if name in IMAGES else (channels,)
    network = make(channels)
    x = torch.randn(samples, *shape)
    for dtype, bound in BOUNDS.items():
        network.to(dtype).train()
        x = x.to(dtype)
        assert max(differences(network, x)) < bound
        assert max(differences(network.eval(), x)) < bound
        assert max(differences(network, x[:1])) < bound


def random_pair(numbers: random.Random, low: int, high: int) -> tuple[int, int]:
    return numbers.randint(low, high), numbers.randint(low, high)


def random_convolution(numbers: random.Random) -> tuple[nn.Module, Tensor]:
    """Returns a convolution of any kernel, stride, padding and dilation, and images that it fits."""
    pair = partial(random_pair, numbers)
    channels = numbers.randint(1, 20)
    kernel, dilation, padding = pair(1, 5), pair(1, 2), pair(0, 3)
    stride = pair(1, 3)
    outputs, groups = numbers.choice([(channels, channels), (pair(1, 20)[0], 1)])
    bias = numbers.random() < 0.5
    layer = nn.Conv2d(
        channels, outputs, kernel, stride, padding, dilation, groups, bias
    )
    sides = [
        max(1, d * (k - 1) + 1 - 2 * p) + numbers.randint(0, 6)
        for k, d, p in zip(kernel, dilation, padding, strict=True)
    ]
    return layer, torch.randn(numbers.randint(1, 35), channels, *sides)


def random_pool(numbers: random.Random) -> tuple[nn.Module, Tensor]:
    """Returns a pool of any kernel, stride and padding, and images of few values, whose maxima tie."""
    pair = partial(random_pair, numbers)
    kernel = pair(1, 4)
    padding = (numbers.randint(0, kernel[0] // 2), numbers.randint(0, kernel[1] // 2))
    ceiling = numbers.random() < 0.5
    layer: nn.Module = nn.MaxPool2d(kernel, pair(1, 4), padding, ceil_mode=ceiling)
    if numbers.random() < 0.3:
        counted = numbers.random() < 0.5
        layer = nn.AvgPool2d(kernel, pair(1, 4), padding, ceiling, counted)
    sides = [numbers.randint(k, 9) for k in kernel]
    shape = (numbers.randint(1, 35), numbers.randint(1, 5), *sides)
    return layer, torch.randint(-1, 2, shape).float()


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("make", [random_convolution, random_pool])
def test_a_layer_of_any_size_equals_pytorch(
    make: Callable[[random.Random], tuple[nn.Module, Tensor]], seed: int
) -> None:
    torch.manual_seed(seed)
    layer, x = make(random.Random(seed))
    for dtype, bound in BOUNDS.items():
        assert max(differences(layer.to(dtype), x.to(dtype))) < bound, layer


def small_network() -> nn.Sequential:
    return chain(
        nn.Conv2d(2, 3, 3, padding=1, bias=False),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 6, 3, padding=1),
        nn.GroupNorm(2, 6),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    )


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-11)]
)
def test_a_network_equals_pytorch_in_both_precisions(
    dtype: torch.dtype, bound: float
) -> None:
    torch.manual_seed(0)
    assert (
        max(
            differences(
                small_network().to(dtype), torch.randn(37, 2, 7, 9, dtype=dtype)
            )
        )
        < bound
    )


def test_weights_in_channels_last_are_read_and_their_gradients_written_by_their_strides() -> (
    None
):
    torch.manual_seed(0)
    network = (
        nn.Conv2d(4, 5, 3, padding=1).double().to(memory_format=torch.channels_last)
    )  # type: ignore[call-overload]
    assert (
        max(differences(network, torch.randn(5, 4, 6, 6, dtype=torch.float64))) < 1e-12
    )


def test_the_first_of_equal_numbers_is_the_largest() -> None:
    network = nn.MaxPool2d(2)
    x = torch.zeros(17, 1, 4, 4)
    x[:, :, 2:] = float("-inf")
    assert max(differences(network, x.clamp(min=-1))) == 0
    tape, _ = on_tape(network, (1, 4, 4))
    gradient = torch.zeros_like(x)
    tape.program().run(x, torch.ones(17, 1, 2, 2), gradient)
    expected = torch.zeros(4, 4)
    expected[::2, ::2] = 1
    assert torch.equal(gradient, expected.expand_as(gradient))


OTHERWISE = [name for name in IMAGES if "norm, relu" in name]
OTHERWISE.append("convolution larger than its input")
"""PyTorch subtracts infinities where a tape has one: a norm as x w - m w, and products of weights and the padding."""


@pytest.mark.parametrize("place", ["input", "weight", "bias", "gradient"])
@pytest.mark.parametrize("name", [*IMAGES, *VECTORS])
def test_a_number_that_is_not_finite_comes_out_as_in_pytorch(
    name: str, place: str
) -> None:
    for bad in (float("nan"), float("inf"), float("-inf")):
        torch.manual_seed(0)
        channels = 4
        network = (IMAGES.get(name) or VECTORS[name])(channels)
        x = torch.randn(19, channels, *((5, 6) if name in IMAGES else ()))
        if place == "input":
            x[3, 1] = bad
        for key, parameter in network.named_parameters():
            if key.endswith(place):
                parameter.data.view(-1)[0] = bad
        gradient = torch.ones_like(copy.deepcopy(network)(x))
        if place == "gradient":
            gradient[3, 0] = bad
        pairs = both_ways(network, x, gradient)
        for mine, other in pairs:
            if place == "weight" and name in OTHERWISE:
                assert mine.isfinite().all() == other.isfinite().all(), bad
            else:
                assert torch.equal(mine.isfinite(), other.isfinite()), bad


def test_what_is_frozen_has_no_gradient() -> None:
    network = chain(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    network[0].requires_grad_(False)
    tape, _ = on_tape(network, (3,))
    program = tape.program()
    assert [gradient.shape for gradient in program.gradients] == [(2, 4), (2,)]
    x = torch.randn(5, 3, dtype=torch.float64)
    network(x).sum().backward()
    program.run(x, torch.ones(5, 2, dtype=torch.float64))
    for mine, parameter in zip(program.gradients, network[2].parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad)


def test_values_that_are_read_twice_gather_both_gradients() -> None:
    """h + 0.5 f(h) · sigmoid(mean f(h)), as seeds with a gate are blended."""
    torch.manual_seed(0)
    body = nn.Conv2d(3, 3, 3, padding=1).double()
    tape = Tape((3, 5, 4))
    f = tape.add(body, 0)
    mean = tape.add(nn.AdaptiveAvgPool2d(1), f)
    gate = tape.add(nn.Sigmoid(), mean)
    delta = tape.emit("multiply", f, (3, 5, 4), other=gate)
    alpha = torch.tensor([9.0, 0.5], dtype=torch.float64)
    tape.emit("add", 0, (3, 5, 4), [tape.tensor(alpha), 1], other=delta)
    program = tape.program()

    x = torch.randn(18, 3, 5, 4, dtype=torch.float64, requires_grad=True)
    h = body(x)
    expected = x + 0.5 * h * torch.sigmoid(h.mean(dim=(2, 3), keepdim=True))
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    input_gradient = torch.empty_like(x.detach())
    torch.testing.assert_close(
        program.run(x, gradient, input_gradient), expected.detach()
    )
    torch.testing.assert_close(input_gradient, x.grad)
    torch.testing.assert_close(program.gradients[0], body.weight.grad)


def test_a_relu_joins_a_norm_only_if_nothing_reads_between() -> None:
    norm = nn.BatchNorm2d(3).double()
    tape = Tape((3, 4, 4))
    between = tape.add_all([norm], 0)
    rectified = tape.add_all([nn.ReLU()], between)
    tape.emit("add", between, (3, 4, 4), [-1], (2.0, 0.0), other=rectified)
    x = torch.randn(5, 3, 4, 4, dtype=torch.float64)
    h = copy.deepcopy(norm)(x)
    torch.testing.assert_close(tape.program().run(x), (h + 2 * h.relu()).detach())


@pytest.mark.parametrize("side", [8, 9])
def test_a_pool_that_takes_in_its_norm_gives_the_same_bits(side: int) -> None:
    """A seed that comes or goes between norm and pool must not change the host."""
    torch.manual_seed(0)
    network = chain(
        nn.Conv2d(2, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.MaxPool2d(2)
    )
    apart = copy.deepcopy(network)
    shape = (2, side, side)
    together, _ = on_tape(network, shape)
    tape = Tape(shape)
    between = tape.add_all(list(apart[:3]), 0)
    pooled = tape.add(apart[3], between)
    flat = tape.add(nn.AdaptiveAvgPool2d(1), between)
    tape.emit("multiply", flat, (5, 1, 1), other=flat)  # a reader of the numbers
    tape.emit("add", pooled, tape.shapes[pooled], [-1], (0.0, 0.0), other=pooled)
    x = torch.randn(19, *shape)
    gradient = torch.randn(19, 5, side // 2, side // 2)
    programs = [together.program(), tape.program()]
    outputs = [program.run(x, gradient) for program in programs]
    assert torch.equal(outputs[0], outputs[1])
    for one, other in zip(programs[0].gradients, programs[1].gradients, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(network.buffers(), apart.buffers(), strict=True):
        assert torch.equal(one, other)


def test_memory_that_a_program_leaves_does_not_reach_the_next() -> None:
    torch.manual_seed(0)
    broken = small_network()
    with torch.no_grad():
        broken[0].weight.fill_(float("nan"))
    tape, _ = on_tape(broken, (2, 9, 7))
    tape.program().run(torch.randn(40, 2, 9, 7), torch.ones(40, 4, 1, 1))
    assert max(differences(small_network(), torch.randn(5, 2, 9, 7))) < 1e-5


def test_the_variance_of_values_far_from_zero_is_exact() -> None:
    torch.manual_seed(0)
    network = nn.BatchNorm2d(3)
    x = 1e4 + torch.randn(50, 3, 9, 9)
    tape, _ = on_tape(network, (3, 9, 9))
    tape.program().run(x)
    exact = nn.BatchNorm2d(3).double()
    exact(x.double())
    torch.testing.assert_close(
        network.running_var, exact.running_var, check_dtype=False, rtol=1e-5, atol=0
    )
    torch.testing.assert_close(
        network.running_mean, exact.running_mean, check_dtype=False, rtol=1e-6, atol=0
    )


def test_lanes_without_a_sample_overflow_nothing() -> None:
    """They are zero, far from the mean, and each norm of a constant would multiply them by 316."""
    norms = [nn.BatchNorm2d(2) for _ in range(16)]
    tape, _ = on_tape(chain(*norms, nn.Conv2d(2, 3, 3, padding=1)), (2, 4, 4))
    program = tape.program()
    output = program.run(torch.full((17, 2, 4, 4), 1e5), torch.ones(17, 3, 4, 4))
    assert output.isfinite().all()
    for gradient in program.gradients:
        assert gradient.isfinite().all()


def test_a_parameter_that_layers_share_is_refused_unless_it_is_frozen() -> None:
    shared = nn.Linear(4, 4).double()
    with pytest.raises(Unsupported, match="share"):
        on_tape(chain(shared, nn.Tanh(), shared), (4,))
    network = chain(shared.requires_grad_(False), nn.Tanh(), shared)
    x = torch.randn(3, 4, dtype=torch.float64)
    tape, _ = on_tape(network, (4,))
    torch.testing.assert_close(tape.program().run(x).view(3, 4), network(x))


def test_a_program_that_writes_a_gradient_twice_is_refused() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    tape, _ = on_tape(chain(first, second), (4,))
    tape.code[1][4] = tape.code[0][4]
    with pytest.raises(RuntimeError, match="written once"):
        tape.program().run(torch.zeros(2, 4))


def test_the_gradient_of_what_the_output_does_not_depend_on_is_zero() -> None:
    tape = Tape((4, 1, 1))
    tape.add(nn.Linear(4, 4), 0)
    used = tape.add(nn.Linear(4, 2), 0)
    program = tape.program()
    for gradient in program.gradients:
        gradient.fill_(7)
    program.run(torch.ones(2, 4), torch.ones(2, 2))
    weight, bias, *rest = program.gradients
    assert used == 2
    assert not weight.any()
    assert not bias.any()
    assert all(gradient.any() for gradient in rest)


def test_a_batch_norm_that_has_one_value_a_channel_is_refused_in_training() -> None:
    tape, _ = on_tape(nn.BatchNorm1d(3), (3,))
    program = tape.program()
    with pytest.raises(RuntimeError, match="more than one value"):
        program.run(torch.zeros(1, 3))
    program.run(torch.zeros(1, 3), training=False)


@pytest.mark.parametrize(
    ("layer", "word"),
    [
        (nn.Conv2d(4, 4, 3, groups=2), "groups"),
        (nn.Conv2d(4, 4, 3, padding_mode="reflect"), "padding"),
        (nn.Bilinear(2, 2, 2), "Bilinear"),
        (nn.Dropout(0.5), "dropout"),
    ],
)
def test_a_layer_without_a_compiled_form_is_named(layer: nn.Module, word: str) -> None:
    with pytest.raises(Unsupported, match=word):
        on_tape(layer, (4, 6, 6))


def wrong_programs() -> list[tuple[str, int, int]]:
    """Columns of a convolution's row that are set to a wrong number, with a word of the message."""
    return [
        ("no such layer", 0, 99),
        ("earlier value", 1, 5),
        ("next value", 3, 7),
        ("not there", 4, 3),
        ("wrong shape", 6, 2),
        ("wrong kernel", 8, 0),
        ("groups of several", 14, 2),
    ]


@pytest.mark.parametrize(("words", "column", "number"), wrong_programs())
def test_a_wrong_program_is_refused_before_it_reads_anything(
    words: str, column: int, number: int
) -> None:
    tape, _ = on_tape(nn.Conv2d(4, 3, 3), (4, 5, 5))
    tape.code[0][column] = number
    with pytest.raises(RuntimeError, match=words):
        tape.program().run(torch.zeros(2, 4, 5, 5))


def test_a_batch_of_another_shape_or_dtype_is_refused() -> None:
    tape, _ = on_tape(nn.Conv2d(4, 3, 3), (4, 5, 5))
    program = tape.program()
    with pytest.raises(RuntimeError, match="expected 2 times 4 × 5 × 5"):
        program.run(torch.zeros(2, 4, 5, 6))
    with pytest.raises(RuntimeError, match="dtype of the network"):
        program.run(torch.zeros(2, 4, 5, 5, dtype=torch.float64))
