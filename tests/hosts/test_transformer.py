"""The transformer host: its size, what each token may see, and a head that stays tied."""

import copy
import math
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from esper.hosts.transformer import Block, TiedHead, TransformerHost


def small(slots: int = 2) -> TransformerHost:
    torch.manual_seed(0)
    return TransformerHost(
        vocabulary=11, width=8, layers=4, heads=2, block=6, slots=slots
    )


def tied_weight(host: TransformerHost) -> torch.Tensor:
    head = host.segments[-1][-1]  # type: ignore[index]
    assert isinstance(head, TiedHead)
    return head._tied[0].token.weight


def embedding_weight(host: TransformerHost) -> torch.Tensor:
    return host.get_parameter("segments.0.0.token.weight")


@pytest.mark.parametrize(
    ("vocabulary", "width", "layers", "block"), [(11, 8, 4, 6), (104, 64, 2, 64)]
)
def test_parameters_by_formula(
    vocabulary: int, width: int, layers: int, block: int
) -> None:
    host = TransformerHost(vocabulary, width, layers, 2, block, 1)
    # 4 D² in attention and 8 D² in the MLP; biases 3 D + D + 4 D + D and two norms of 2 D; the last norm 2 D.
    assert (
        host.parameter_count
        == (vocabulary + block) * width
        + layers * (12 * width**2 + 13 * width)
        + 2 * width
    )


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_slots_sit_after_equal_groups_of_layers(slots: int) -> None:
    host = small(slots)
    assert host.topology == "transformer"
    assert host.slot_names == tuple(f"r0c{i}" for i in range(slots))
    assert [site.channels for site in host.sites] == [8] * slots
    blocks = [
        sum(isinstance(m, Block) for m in segment.modules())
        for segment in host.segments
    ]
    assert blocks == [4 // slots] * slots + [0]
    h = torch.randint(11, (3, 5))
    for segment in host.segments[:-1]:
        h = segment(h)
        assert h.shape == (3, 5, 8)
    assert host.segments[-1](h).shape == (3, 5, 11)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"slots": 3}, "slots .3."),
        ({"heads": 3}, "heads .3."),
        ({"layers": 0}, "1 or more"),
        ({"slots": 0}, "1 or more"),
    ],
)
def test_numbers_that_do_not_divide_are_refused(
    changed: dict[str, int], message: str
) -> None:
    sizes = {
        "vocabulary": 11,
        "width": 8,
        "layers": 4,
        "heads": 2,
        "block": 6,
        "slots": 2,
        **changed,
    }
    with pytest.raises(ValueError, match=message):
        TransformerHost(**sizes)


@pytest.mark.parametrize("place", [1, 5])
def test_no_token_sees_later_tokens(place: int) -> None:
    host = small()
    with torch.no_grad():  # larger than the start, so that what leaks would be seen
        for parameter in host.parameters():
            parameter.mul_(10)
    before = torch.randint(11, (2, 6))
    after = before.clone()
    after[:, place] = (after[:, place] + 1) % 11
    a, b = host(before), host(after)
    torch.testing.assert_close(a[:, :place], b[:, :place], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(a[:, place:], b[:, place:], rtol=1e-3, atol=1e-3)


def test_the_head_is_the_token_embedding() -> None:
    host = small()
    assert tied_weight(host) is embedding_weight(host)
    shapes = [tuple(p.shape) for p in host.parameters()]
    assert shapes.count((11, 8)) == 1
    # The embedding has the gradient of both its uses: tokens that do not occur get one from the head.
    host(torch.zeros(1, 2, dtype=torch.int64)).square().sum().backward()
    gradient = embedding_weight(host).grad
    assert gradient is not None
    assert bool((gradient.abs().sum(dim=1) > 0).all())


def test_the_shared_tensor_is_in_the_state_dict_once(tmp_path: Path) -> None:
    host, other = small(), TransformerHost(11, 8, 4, 2, 6, 2)
    state = host.state_dict()
    assert sum(tensor.numel() for tensor in state.values()) == host.parameter_count
    safetensors.torch.save_file(
        state, tmp_path / "host.safetensors"
    )  # refuses tensors that share memory
    tokens = torch.randint(11, (2, 6))
    assert not torch.equal(host(tokens), other(tokens))
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "host.safetensors"))
    assert torch.equal(host(tokens), other(tokens))
    assert tied_weight(other) is embedding_weight(other)


def test_a_deep_copy_is_tied_to_itself() -> None:
    host = small()
    twin = copy.deepcopy(host)
    assert tied_weight(twin) is embedding_weight(twin)
    assert tied_weight(twin) is not tied_weight(host)
    before = host(torch.tensor([[1, 2]]))
    with torch.no_grad():
        embedding_weight(twin).zero_()
    assert torch.equal(host(torch.tensor([[1, 2]])), before)
    assert not twin(torch.tensor([[1, 2]])).any()


def test_weights_start_as_gpt2s() -> None:
    torch.manual_seed(0)
    host = TransformerHost(
        vocabulary=500, width=64, layers=8, heads=4, block=64, slots=2
    )
    for name, parameter in host.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.ndim == 2:
            residual = name.endswith(("project.weight", "mlp.2.weight"))
            wanted = 0.02 / math.sqrt(16) if residual else 0.02
            assert float(parameter.detach().std()) == pytest.approx(wanted, rel=0.05), (
                name
            )
    norms = [m for m in host.modules() if isinstance(m, nn.LayerNorm)]
    assert len(norms) == 17
    assert all(bool((norm.weight == 1).all()) for norm in norms)
    # A fresh host knows nothing: its loss is that of guessing.
    logits = host(torch.randint(500, (8, 64)))
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(500, (512,)))
    assert float(loss.detach()) == pytest.approx(math.log(500), rel=0.02)
