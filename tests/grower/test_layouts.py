"""Layouts that are inferred before anything is planted, and seeds that mix positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import esper
from esper.config import ConfigError
from esper.core.blueprints import BLUEPRINTS
from esper.core.place import Place
from esper.core.ramps import BlendOperator
from esper.core.site import seed_of as seed_at
from esper.core.state import Choices
from esper.grower.layouts import mixes_positions, obstacle
from tests.grower.loops import GROWS, LENIENT, Loop, X, Y, net, same, scores, weights
from tests.hosts.grown_modules import seed_of


class OnlyInTraining(nn.Module):
    """A user's: it cannot run on its training batches in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and len(x) == 16:
            raise RuntimeError("no batch of training in eval mode")
        return self.inner(x)  # type: ignore[no-any-return]


def known(loop: Loop) -> Choices:
    """The sizes of the model and the seeds, known after the first epoch."""
    loop.run(1)
    assert loop.grower.env is not None
    return loop.grower.env.choices


def test_the_operations_of_the_model_and_of_seeds_are_those_of_their_weights() -> None:
    choices = known(Loop())
    assert choices.host_flops == sum(
        2 * p.numel() for p in net().parameters() if p.dim() == 2
    )
    assert choices.flops.shape == choices.parameters.shape
    assert (choices.flops < 2 * choices.parameters).all()
    assert choices.flops.any()


def test_a_loop_that_is_resumed_knows_what_was_counted() -> None:
    first = Loop()
    counted = known(first)
    state = first.grower.state_dict()
    other = Loop()
    other.grower.load_state_dict(state)
    assert other.grower.env is not None
    assert other.grower.env.choices.host_flops == counted.host_flops
    np.testing.assert_array_equal(other.grower.env.choices.flops, counted.flops)


def test_operations_that_cannot_be_counted_are_unknown_and_no_price() -> None:
    sites = {"r0c0": "inner.body.0"}
    assert known(Loop(model=OnlyInTraining(), sites=sites)).host_flops == 0
    config = LENIENT.with_values(reward={"rent_in": "flops"})
    with pytest.raises(
        ConfigError, match=r"not known, so reward.rent_in must be parameters"
    ):
        Loop(model=OnlyInTraining(), sites=sites, config=config).run(1)


def test_a_model_that_cannot_run_in_eval_mode_needs_a_topology() -> None:
    sites = {"r0c0": "inner.body.0"}
    with pytest.raises(
        esper.ConfigError,
        match=r"which fails: .*no batch of training in eval mode.*if topology= says",
    ):
        Loop(model=OnlyInTraining(), sites=sites, topology=None).run(1)
    assert Loop(model=OnlyInTraining(), sites=sites, topology="mlp").run(1).steps


@pytest.mark.parametrize("topology", ["transformer", "encoder"])
@pytest.mark.parametrize(
    ("name", "operator", "mixes"),
    [
        ("attention", BlendOperator.ADD, True),
        ("lora", BlendOperator.GATE, True),
        ("lora", BlendOperator.MULTIPLY, False),
        ("mlp_small", BlendOperator.ADD, False),
        ("norm", BlendOperator.ADD, False),
    ],
)
def test_mixing_is_measured(
    topology: str, name: str, operator: BlendOperator, mixes: bool
) -> None:
    torch.manual_seed(0)
    seed = seed_of(name, topology, operator)
    place = Place("r0c0", 8, topology=topology)
    assert mixes_positions(seed, torch.randn(2, 5, 8), place) is mixes
    assert seed.training
    assert not mixes_positions(seed, torch.randn(2, 1, 8), place)


def test_positions_of_a_sequence_that_comes_first_are_mixed_too() -> None:
    place = Place("r0c0", 8, topology="encoder", order=(1, 0, 2))
    for name, mixes in (("attention", True), ("mlp_small", False)):
        seed = seed_at(BLUEPRINTS.get("encoder", name), BlendOperator.ADD, place)
        assert mixes_positions(seed, torch.randn(5, 2, 8), place) is mixes


class Model(nn.Module):
    def forward(
        self, batch: dict[str, Tensor], attention_mask: Tensor | None = None
    ) -> None:
        """Nothing is computed."""


class Generates(Model):
    def can_generate(self) -> bool:
        return True


MASK = torch.tensor([[1, 1], [1, 0]])


@pytest.mark.parametrize(
    ("arguments", "keywords", "padded"),
    [
        (({},), {}, False),
        (({}, MASK), {}, True),
        (({},), {"attention_mask": MASK}, True),
        (({"attention_mask": MASK},), {}, True),
        (({"src_key_padding_mask": MASK == 0},), {}, True),
        (({"attention_mask": torch.ones(2, 2)},), {}, False),
        (({"attention_mask": MASK[:, None]},), {}, False),
        (({"labels": MASK},), {}, False),
    ],
)
def test_a_mask_counts_if_it_hides_something(
    arguments: Any, keywords: dict[str, Any], padded: bool
) -> None:
    found = obstacle(Model(), "encoder", (arguments, keywords))
    assert found == (
        "batches are padded, and the seed does not see the mask" if padded else None
    )


def test_a_part_that_generates_counts_for_causal_seeds() -> None:
    model = nn.ModuleDict({"inner": Generates()})
    assert "cache" in str(obstacle(model, "transformer", None))
    assert obstacle(model, "encoder", None) is None


class Positions(nn.Module):
    """Mixes the positions of [B, T, D] or [T, B, D]; its first argument is a mask [T, T] or a table [T, D]."""

    def __init__(self, batch_first: bool, first: str) -> None:
        super().__init__()
        self.batch_first, self.first = batch_first, first
        self.read, self.mix, self.head = (
            nn.Linear(2, 16),
            nn.Sequential(nn.Linear(16, 16), nn.ReLU()),
            nn.Linear(16, 3),
        )

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        h = self.read(x)
        if self.first == "table":
            h = h + (first if self.batch_first else first[:, None])
        h = self.mix(h)
        return self.head(h.mean(1 if self.batch_first else 0))  # type: ignore[no-any-return]


@pytest.mark.parametrize("first", ["mask", "table"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_samples_are_found_where_samples_do_not_see_one_another(
    batch_first: bool, first: str
) -> None:
    """Whatever the sizes of the first argument, which all samples share."""
    torch.manual_seed(0)
    model = Positions(batch_first, first)
    shared = torch.zeros(4, 4 if first == "mask" else 16)
    sequences = X.view(64, 4, 2)
    if not batch_first:
        sequences = sequences.transpose(0, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    grower = esper.Grower(model, ["mix"], optimizer, horizon=3)
    nn.functional.cross_entropy(model(shared, sequences), Y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    grower.step(lambda model: (model.eval()(shared, sequences).argmax(1) == Y).float())
    place = grower.hooks.sites["r0c0"].place
    assert place.topology in ("encoder", "transformer")
    assert (place.order in ((), (0, 1, 2))) is batch_first
    assert batch_first or place.order == (1, 0, 2)


class ByMethods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(6, 3)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x)


IMAGES = torch.randn(64, 1, 5, 5, generator=torch.Generator().manual_seed(3))


def grown_by_methods(score: Any, topology: str | None = None) -> Any:
    model = ByMethods()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    grower = esper.Grower(model, ["body"], optimizer, horizon=3, topology=topology)
    nn.functional.cross_entropy(model.train().logits(IMAGES), Y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    grower.step(score)
    return grower.hooks.sites["r0c0"].place


def test_a_loop_that_calls_methods_needs_a_pass_of_the_model_or_a_topology() -> None:
    with pytest.raises(
        ConfigError, match=r"no pass has called the model itself.*or pass topology="
    ):
        grown_by_methods(
            lambda model: (model.eval().logits(IMAGES).argmax(1) == Y).float()
        )
    place = grown_by_methods(
        lambda model: (model.eval()(IMAGES).argmax(1) == Y).float()
    )
    assert (place.topology, place.channels) == ("cnn", 6)
    place = grown_by_methods(
        lambda model: (model.eval().logits(IMAGES).argmax(1) == Y).float(), "cnn"
    )
    assert (place.topology, place.channels) == ("cnn", 6)


def test_a_sample_without_a_batch_dimension_is_refused() -> None:
    """Its channels would be taken for samples."""
    model: Any = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(9, 3)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    grower = esper.Grower(model, ["1"], optimizer, horizon=3)
    model(IMAGES[0]).sum().backward()
    optimizer.step()
    with pytest.raises(
        ConfigError,
        match=r"Conv2d returns shape \(6, 3, 3\): .*without a batch dimension",
    ):
        grower.step(lambda model: 0.5)


class Experts(nn.Module):
    """The second expert gets few samples, or none, or is not called."""

    def __init__(self, calls_empty: bool) -> None:
        super().__init__()
        self.calls_empty = calls_empty
        self.read, self.head = nn.Linear(8, 12), nn.Linear(12, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 12), nn.ReLU()) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.read(x)
        out = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            rows = ((x[:, 3] > 0.9).long() == number).nonzero().squeeze(1)
            if len(rows) or self.calls_empty:
                out = out.index_add(0, rows, expert(h[rows]))
        return self.head(h + out)  # type: ignore[no-any-return]


@pytest.mark.parametrize("calls_empty", [True, False])
def test_an_expert_without_samples_in_some_passes_grows(calls_empty: bool) -> None:
    torch.manual_seed(0)
    model = Experts(calls_empty)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    grower = esper.Grower(
        model, {"r0c0": "experts.1"}, optimizer, GROWS, 14, config=LENIENT
    )
    few = X[:, 3].argsort()[:40]  # none of them is for the second expert
    for epoch in range(14):
        model.train()
        batches = [*few.split(20), torch.arange(64)]
        if epoch == 6 and calls_empty:
            batches = [few]
        for rows in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(X[rows]), Y[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        grower.step(scores)
    assert grower.kept
    assert all(len(probe.h) for probe in grower.hooks.probes.values())
    assert grower.finish()(X).isfinite().all()


def test_passes_within_a_transform_leave_no_trace_in_a_growing_model() -> None:
    """A loop may watch curvature or per-sample gradients beside its own passes."""
    loop = Loop()

    def watch(model: nn.Module) -> None:
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss(values: Any, x: Tensor) -> Tensor:
            return torch.func.functional_call(model, values, (x[None],)).square().sum()

        model.eval()
        torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, X[:4])

    watch(loop.model)
    other = Loop()
    for _ in range(loop.epochs):
        for each in (loop, other):
            each.run(1)
        loop.model.train()
        watch(loop.model)
    assert same(weights(loop.model), weights(other.model))
    assert loop.grower.kept == other.grower.kept


class ByMethod(nn.Module):
    """A loop calls ``logits``, and never the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def logits(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x)


def grown_by(method: bool, change: Any = None, **arguments: Any) -> Any:
    """Trains with a step in every second batch; ``change`` is called with the loop after each epoch."""

    def call(model: Any, x: Tensor) -> Tensor:
        x = x.to(model.net.head.weight.dtype)
        return model.logits(x) if method else model(x)  # type: ignore[no-any-return]

    def step(loop: Loop, x: Tensor, y: Tensor) -> None:
        loop.model.zero_grad()
        nn.functional.cross_entropy(call(loop.model, x), y).backward()  # type: ignore[no-untyped-call]
        loop.count = getattr(loop, "count", 0) + 1  # type: ignore[attr-defined]
        if loop.count % 2:  # type: ignore[attr-defined]
            loop.optimizer.step()

    sites = {"r0c0": "net.body.0"}
    loop = Loop(model=ByMethod(), step=step, sites=sites, **arguments)  # type: ignore[arg-type]
    loop.model.load_state_dict({f"net.{k}": v for k, v in net().state_dict().items()})
    for _ in range(loop.epochs):
        loop.train()
        loop.grower.step(lambda m: (call(m.eval(), X).argmax(1) == Y).double())
        if change is not None:
            change(loop)
    return loop


def test_a_loop_that_calls_methods_trains_seeds_as_one_that_calls_the_model() -> None:
    """Gradients of batches without a step are forgotten in both."""
    found = [grown_by(method) for method in (True, False)]
    seeds = [loop.grower.hooks.sites["r0c0"].seed.state_dict() for loop in found]
    assert same(*seeds)
    assert same(*(weights(loop.model) for loop in found))


def test_seeds_of_a_loop_that_calls_methods_follow_the_model_to_another_dtype() -> None:
    def change(loop: Loop) -> None:
        if loop.epoch == 3:
            loop.model.double()

    plain_sgd: Any = lambda p: torch.optim.SGD(p, 0.1)  # noqa: E731
    loop = grown_by(True, change, make_optimizer=plain_sgd)
    assert loop.grower.kept
    assert {p.dtype for p in loop.grower.finish().parameters()} == {torch.float64}


def test_a_loop_that_calls_methods_has_its_folder(tmp_path: Path) -> None:
    grown_by(True, folder=tmp_path / "run").grower.finish()
    assert (tmp_path / "run" / "events.jsonl").stat().st_size


def test_a_site_within_a_transform_is_refused_with_the_reason() -> None:
    class Mapped(ByMethod):
        def forward(self, x: Tensor) -> Tensor:
            return torch.func.vmap(self.net.head)(self.net.body(x))

    loop = Loop(model=Mapped(), sites={"r0c0": "net.head"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"only within transforms of torch\.func"):
        loop.run(1)


@pytest.mark.parametrize("name", ["valid", "src_mask", "pad_positions", "is_word"])
def test_a_mask_of_any_usual_name_keeps_seeds_from_mixing_positions(name: str) -> None:
    class Masked(nn.Module):
        pass

    namespace: dict[str, Any] = {}
    exec(f"def forward(self, x, {name}): return x", namespace)
    Masked.forward = namespace["forward"]  # type: ignore[attr-defined]
    mask = torch.ones(2, 5, dtype=torch.bool)
    if name != "is_word":
        mask = mask.float()
    arguments = (torch.zeros(2, 5, 8), mask)
    assert obstacle(Masked(), "transformer", (arguments, {})) is None
    mask[0, 0] = 0
    assert "padded" in (obstacle(Masked(), "transformer", (arguments, {})) or "")
    other = torch.arange(10.0).view(2, 5)
    assert obstacle(Masked(), "transformer", ((), {"x": other})) is None
