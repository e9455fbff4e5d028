"""Hosts whose BatchNorm, ReLU and pool are one operator: the same networks as those of plain modules, and nothing falls
back to these unnoticed."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from esper.core.blueprints import BLUEPRINTS
from esper.core.place import Features
from esper.core.stage import SeedStage as S
from esper.data.split import Split
from esper.hosts import cnn
from esper.hosts.cnn import CNNHost
from esper.ops.norm_relu_pool import NormReluPool
from esper.training.validate import evaluate
from tests.core_helpers import plant, same_bits, tensors_of, train
from tests.training.byte_images import byte_digits
from tests.training.test_foreign_hosts import training_of

SHAPES: dict[str, dict[str, Any]] = {
    "two rows": {"blocks": 3},
    "one row": {"blocks": 3, "rows": 1},
    "no pool": {"blocks": 2, "rows": 1, "pool": False},
    "last not pooled": {"blocks": 2, "pool_last": False},
    "one row, last not pooled": {"blocks": 2, "rows": 1, "pool_last": False},
    "1x1": {"blocks": 2, "kernel": 1},
}
DTYPES = ("float32", "bfloat16")


def made(shape: str, seed: int = 0) -> CNNHost:
    torch.manual_seed(seed)
    return CNNHost(3, 10, base=8, **SHAPES[shape])


def twin_of(host: CNNHost, shape: str, monkeypatch: pytest.MonkeyPatch) -> CNNHost:
    """The same host of plain modules, in plain memory."""
    with monkeypatch.context() as patched:
        patched.setattr(cnn, "FUSED_CHANNELS", 10**9)
        plain = made(shape, seed=1)
    assert not any(isinstance(module, NormReluPool) for module in plain.modules())
    plain.load_state_dict(host.state_dict())
    return plain


def images(count: int = 6, side: int = 16) -> Tensor:
    return torch.randn(
        count, 3, side, side, generator=torch.Generator().manual_seed(count)
    )


def in_precision(dtype: str) -> torch.autocast:
    return torch.autocast(
        "cpu", torch.bfloat16, enabled=dtype == "bfloat16", cache_enabled=False
    )


def pass_on(_site: int, here: Features) -> Tensor:
    return here.h


def passed(
    host: CNNHost,
    x: Tensor,
    dtype: str,
    vacant: Collection[int] = (),
    training: bool = True,
) -> dict[str, Tensor]:
    """Logits, the gradient of the inputs and of every parameter, and every buffer after one pass."""
    x = x.clone().requires_grad_()
    host.train(training)
    host.zero_grad()
    with in_precision(dtype):
        logits = host.forward_with_hook(x, pass_on, vacant)
    F.cross_entropy(logits.float(), torch.arange(len(x)) % 10).backward()
    assert x.grad is not None
    found = {"logits": logits.detach().float(), "inputs": x.grad}
    found |= {
        name: p.grad.clone()
        for name, p in host.named_parameters()
        if p.grad is not None
    }
    return found | {name: buffer.clone() for name, buffer in host.named_buffers()}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_fused_host_has_the_keys_and_values_of_plain_modules(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = made(shape)
    plain = twin_of(host, shape, monkeypatch)
    assert list(host.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in host.named_parameters()] == [
        name for name, _ in plain.named_parameters()
    ]
    assert list(host.state_dict())[:2] == ["segments.0.0.weight", "segments.0.1.weight"]
    assert host.parameter_count == plain.parameter_count
    host.load_state_dict(plain.state_dict())
    for training in (True, False):
        for a, b in zip(
            *(
                passed(h, images(), "float32", training=training).items()
                for h in (host, plain)
            ),
            strict=True,
        ):
            assert a[0] == b[0]
            torch.testing.assert_close(a[1], b[1], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(
    ("training", "dtype"), [(True, "float32"), (False, "bfloat16")]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_vacant_sites_change_no_bit(shape: str, training: bool, dtype: str) -> None:
    """The pool behind a vacant site is part of the operator before it; so is each subset of them."""
    host = made(shape)
    passed(host, images(), dtype)  # statistics that are not those of birth
    sites = range(len(host.sites))
    wanted = passed(copy.deepcopy(host), images(), dtype, (), training)
    for vacant in (
        frozenset(sites),
        frozenset({0}),
        frozenset(sites[1:]),
        frozenset(sites[-1:]),
    ):
        same_bits(
            wanted, passed(copy.deepcopy(host), images(), dtype, vacant, training)
        )


def test_vacant_sites_are_not_called_and_their_pools_are_fused() -> None:
    host, called, pools = made("two rows").eval(), list[int](), list[bool]()
    for module in host.modules():
        if isinstance(module, NormReluPool):
            module.register_forward_pre_hook(
                lambda _layer, _inputs, options: pools.append(
                    options.get("pool", False)
                ),
                with_kwargs=True,
            )

    def at(site: int, here: Features) -> Tensor:
        h = here.h
        called.append(site)
        return h

    host.forward_with_hook(images(), at, vacant={0, 4})
    assert (called, pools) == ([1, 2, 3, 5], [True, False, True])
    assert (
        host.segments[0](images()).shape[-1] == 16
    )  # a segment by itself does not pool, whatever was fused before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_from_a_site_ends_with_the_same_bits(shape: str, dtype: str) -> None:
    host = made(shape).eval()
    x, features = images(), dict[int, Tensor]()

    def keep(site: int, here: Features) -> Tensor:
        h = here.h
        features[site] = h
        return h

    with torch.inference_mode(), in_precision(dtype):
        wanted = host.forward_with_hook(x, keep)
        for site, h in features.items():
            for vacant in ((), frozenset(range(len(host.sites))) - {site}):
                assert torch.equal(
                    host.forward_from(x, site, Features.at_sink(h), pass_on, vacant),
                    wanted,
                ), (
                    site,
                    vacant,
                )


@pytest.mark.parametrize(("slot", "dtype"), [("r0c0", "bfloat16"), ("r1c1", "float32")])
def test_a_seed_in_any_slot_leaves_the_bits_of_the_host_alone(
    slot: str, dtype: str
) -> None:
    """Before it germinated the pool behind its slot was fused; afterwards it is not."""
    for stage in (S.GERMINATED, S.TRAINING):
        alone, growing = (
            training_of(byte_digits(), task={"precision": dtype}) for _ in range(2)
        )
        for env in (alone, growing):
            train(env)
        plant(growing, slot, stage=stage)
        for env in (alone, growing):
            train(env, 2)
        assert (growing.vacant != alone.vacant) == (stage is S.TRAINING)
        same_bits(tensors_of(alone), tensors_of(growing))
        off = (0.0,) * 4
        a, b = (evaluate(env, env.task.validation, [off]) for env in (alone, growing))
        assert torch.equal(a.stats, b.stats)


# Nothing falls back


@pytest.mark.slow
def test_the_fused_operator_serves_every_host_with_every_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seeds are incubated both ways and blended in each slot, trained and validated; a fallback is an error."""
    monkeypatch.setenv("ESPER_REQUIRE_NATIVE", "1")
    task = byte_digits()
    for blueprint in BLUEPRINTS.names("cnn"):
        for style in ("LINEAR_ADD", "LINEAR_MULTIPLY", "GATED_GATE"):
            for stage, incubation in (
                (S.TRAINING, "shadow"),
                (S.TRAINING, "ste"),
                (S.HOLDING, "shadow"),
            ):
                env = training_of(
                    task,
                    task={
                        "precision": "bfloat16",
                        "samples_per_epoch": 16,
                        "batch_size": 16,
                    },
                    env={"incubation": incubation},
                )
                for slot in env.sites:
                    plant(env, slot.name, blueprint, style, stage)
                train(env)
                on = tuple(1.0 for _ in env.sites)
                few = Split(
                    task.validation.x[:8], task.validation.y[:8], task.validation.table
                )
                evaluate(env, few, [on, (0.0, *on[1:])])


# Files, copies and snapshots
