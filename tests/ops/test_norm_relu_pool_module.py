"""`NormReluPool` in the place of `nn.BatchNorm2d`: same parameters, buffers, state and behaviour."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.ops.norm_relu_pool import NormReluPool


def pair(pool: bool, **arguments: Any) -> tuple[NormReluPool, nn.BatchNorm2d]:
    torch.manual_seed(1)
    plain = nn.BatchNorm2d(8, **arguments)
    if plain.affine:
        nn.init.normal_(plain.weight)
        nn.init.normal_(plain.bias)
    fused = NormReluPool(8, pool=pool, **arguments)
    fused.load_state_dict(plain.state_dict())
    return fused, plain


def batch(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = (
        torch.randn(16, 8, 12, 12, generator=torch.Generator().manual_seed(seed)) * 2
        + 1
    )
    return x.to(dtype).to(memory_format=torch.channels_last)


def three(plain: nn.BatchNorm2d, x: Tensor, pool: bool) -> Tensor:
    y = F.relu(plain(x))
    return F.max_pool2d(y, 2) if pool else y


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"momentum": 0.3, "eps": 1e-3},
        {"momentum": None},
        {"momentum": 0.0},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pool", [True, False])
def test_training_and_evaluation_follow_batch_norm(
    arguments: dict[str, Any], dtype: torch.dtype, pool: bool
) -> None:
    fused, plain = pair(pool, **arguments)
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-5}
        if dtype == torch.float32
        else {"rtol": 1.6e-2, "atol": 1e-2}
    )
    for step in range(4):
        x = batch(step, dtype)
        torch.testing.assert_close(fused(x), three(plain, x, pool), **tolerance)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(
            dict(fused.named_buffers())[name], buffer, rtol=1e-5, atol=1e-6
        )
    assert fused.num_batches_tracked.item() == 4
    state = copy.deepcopy(fused.state_dict())
    fused.eval()
    plain.eval()
    x = batch(9, dtype)
    torch.testing.assert_close(fused(x), three(plain, x, pool), **tolerance)
    for name, value in fused.state_dict().items():
        assert torch.equal(value, state[name])  # evaluation changes nothing


def test_without_running_statistics() -> None:
    fused, plain = pair(True, track_running_stats=False)
    for module in (fused, plain):
        module.eval()
    assert fused.unserved(batch(0)) is None
    torch.testing.assert_close(
        fused(batch(0)), three(plain, batch(0), True), rtol=1e-5, atol=1e-5
    )


def test_state_is_that_of_batch_norm() -> None:
    fused, plain = pair(False)
    assert list(fused.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in fused.named_parameters()] == [
        n for n, _ in plain.named_parameters()
    ]
    plain.load_state_dict(fused.state_dict())


class Other(nn.Module):
    """The layer that a tool puts in the place of a norm."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, input: Tensor) -> Tensor:
        return torch.zeros_like(input)


def replaced(module: nn.Module) -> nn.Module:
    """The module with another layer in the place of each BatchNorm."""
    for name, child in module.named_children():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            setattr(module, name, Other(child))
    return module


@pytest.mark.parametrize(
    "tool", [nn.SyncBatchNorm.convert_sync_batchnorm, replaced, copy.deepcopy]
)
@pytest.mark.parametrize("pool", [True, False])
def test_tools_that_replace_norms_drop_neither_relu_nor_pool(
    tool: Callable[[nn.Module], nn.Module], pool: bool
) -> None:
    net = nn.Sequential(pair(pool)[0]).eval()
    expected = net(batch(0))
    assert torch.equal(tool(copy.deepcopy(net))(batch(0)), expected)


@pytest.mark.parametrize("pool", [True, False])
@pytest.mark.parametrize(
    "arguments", [{}, {"affine": False}, {"track_running_stats": False}]
)
def test_the_unfused_modules_compute_the_same(
    pool: bool, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ESPER_REQUIRE_NATIVE", raising=False)
    fused, _ = pair(pool, **arguments)
    fused(batch(1))
    for part in fused.parameters():
        part.requires_grad_(False)
    apart = fused.eval().unfused()
    kinds = [nn.BatchNorm2d, nn.ReLU, nn.MaxPool2d]
    assert [type(layer) for layer in apart] == kinds[: 2 + pool]
    torch.testing.assert_close(apart(batch(0)), fused(batch(0)), rtol=1e-5, atol=1e-5)
    assert not any(part.requires_grad for part in apart.parameters())
    with torch.no_grad():
        for part in (*apart.parameters(), *apart.buffers()):
            part.zero_()
    assert bool(fused(batch(0)).any()), "they share no memory"


@pytest.mark.parametrize("training", [True, False])
def test_forward_mode_goes_through_pytorch(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ESPER_REQUIRE_NATIVE", raising=False)
    fused, plain = pair(True, track_running_stats=not training)
    fused.train(training)
    plain.train(training)
    x, along = batch(0), batch(1)
    mine = torch.func.jvp(fused, (x,), (along,))
    theirs = torch.func.jvp(lambda x: three(plain, x, True), (x,), (along,))
    torch.testing.assert_close(mine, theirs)


def test_the_pool_can_move_outside_at_any_time() -> None:
    fused, _ = pair(True)
    other = copy.deepcopy(fused)
    other.pool = False
    x = batch(3, torch.bfloat16)
    assert torch.equal(fused(x), F.max_pool2d(other(x), 2))
    for mine, theirs in zip(fused.buffers(), other.buffers(), strict=True):
        assert torch.equal(mine, theirs)


UNSERVED = {
    "channels_last": lambda x: x.contiguous(),
    "not float32 or bfloat16": lambda x: x.double(),
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("why", UNSERVED)
@pytest.mark.parametrize("pool", [True, False])
def test_other_inputs_go_through_pytorch(
    why: str, pool: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ESPER_REQUIRE_NATIVE", raising=False)
    fused, plain = pair(pool)
    x = UNSERVED[why](batch(0))
    if x.dtype == torch.float64:
        fused.double()
        plain.double()
    assert why in (fused.unserved(x) or "")
    assert torch.equal(fused(x), three(plain, x, pool))
    assert torch.equal(fused.running_var, plain.running_var)


def test_parameters_that_are_not_float32_go_through_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ESPER_REQUIRE_NATIVE", raising=False)
    for fused, x in (
        (NormReluPool(8, affine=False), batch(0)),
        (NormReluPool(8).bfloat16(), batch(0, torch.bfloat16)),
    ):
        assert fused.unserved(x) == "the module has no float32 weight and bias"
        assert fused(x).dtype == x.dtype


def test_requiring_native_makes_the_other_way_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ESPER_REQUIRE_NATIVE", "1")
    fused, _ = pair(True)
    fused(batch(0))
    with pytest.raises(
        RuntimeError,
        match=r"ESPER_REQUIRE_NATIVE=1.*not \[N, C, H, W\] in channels_last",
    ):
        fused(batch(0).contiguous())


def test_under_autocast() -> None:
    fused, plain = pair(True)
    convolution = nn.Conv2d(8, 8, 3, padding=1, bias=False).to(
        memory_format=torch.channels_last
    )
    with torch.autocast("cpu", torch.bfloat16):
        h = convolution(batch(0))
        assert fused.unserved(h) is None
        assert fused(h).dtype == torch.bfloat16
        torch.testing.assert_close(
            fused(h), three(plain, h, True), rtol=1.6e-2, atol=1e-2
        )
