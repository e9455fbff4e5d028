"""LoRA and AdaLoRA by PEFT, as arms of a comparison and as hosts."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.adapters import (
    AdaptedHost,
    import_peft,
    layers_to_adapt,
    size_of_rank,
)
from esper.compare.arms import read_arms
from esper.compare.comparison_run import ComparisonRun
from esper.config import ConfigError
from esper.data.task import Task
from esper.data.tasks import load_task
from esper.hosts.graft import graft
from esper.hosts.transformer import TransformerHost

pytest.importorskip("peft", reason="PEFT is not installed; see the extra integrations")
peft = import_peft()


def small(slots: tuple[str, ...] = ("all",)) -> TransformerHost:
    torch.manual_seed(0)
    host = TransformerHost(vocabulary=11, width=8, layers=2, heads=2, block=6, slots=2)
    host.use_slots(slots)
    return host


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 11, (count, 4, 7), generator=draws)
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


def loss_of(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


@pytest.mark.parametrize("steps", [None, 50], ids=["LoRA", "AdaLoRA"])
@pytest.mark.parametrize("slots", [("r0",), ("all",)], ids="-".join)
def test_at_first_it_computes_what_the_host_does(
    slots: tuple[str, ...], steps: int | None
) -> None:
    x, _ = batches(1)[0]
    plain, adapted = small(slots).eval(), AdaptedHost(small(slots), 2, steps).eval()
    adapted.take(plain)
    assert torch.allclose(plain(x), adapted(x), atol=1e-6)


@pytest.mark.parametrize("slots", [("r0",), ("all",)], ids="-".join)
def test_every_adapter_and_the_last_layer_learn_and_nothing_else(
    slots: tuple[str, ...],
) -> None:
    adapted = AdaptedHost(small(slots), 2)
    x, y = batches(1)[0]
    loss_of(adapted(x), y).backward()
    learning = {
        name for name, p in adapted.host.named_parameters() if p.grad is not None
    }
    assert (
        len([name for name in learning if ".lora_" in name]) == 2 * 2 * 4
    )  # matrices, layers, linear layers in each
    assert {name for name in learning if ".lora_" not in name} == {
        "segments.2.0.weight",
        "segments.2.0.bias",
    }


def test_its_parameters_are_those_of_the_host_and_the_adapters() -> None:
    assert AdaptedHost(
        small(), 3
    ).parameter_count == small().parameter_count + 3 * size_of_rank(small())


def tiny_text() -> Task:
    task = load_task("chars")
    host = TransformerHost(
        vocabulary=task.classes or 0, width=8, layers=2, heads=2, block=64, slots=2
    )
    few = task.validation.evenly_spaced(16)
    sizes = {
        "samples_per_epoch": 32,
        "episode_length": 3,
        "slots": ("all",),
        "n_envs": 2,
        "batch_size": 8,
    }
    return replace(task, build_host=Same(host), validation=few, test=few, **sizes)


class Same:
    """Builds hosts of one shape, with new weights."""

    def __init__(self, host: TransformerHost) -> None:
        self.vocabulary = host.segments[0][0].token.num_embeddings

    def __call__(self) -> TransformerHost:
        return TransformerHost(
            self.vocabulary, width=8, layers=2, heads=2, block=64, slots=2
        )


def test_as_arms_they_have_the_size_and_the_compute_of_the_grown_host(
    tmp_path: Path,
) -> None:
    schedule = tmp_path / "s.toml"
    schedule.write_text(
        '[[action]]\nepoch = 0\nop = "GERMINATE"\nslot = "r1c0"\nblueprint = "widen_whole"\n'
    )
    base = {
        "task": {"start": "trained", "freeze": "body", "data": str(tmp_path / "data")},
        "env": {
            "n_envs": 2,
            "episode_length": 8,
            "baseline_episodes": 1,
            "slots": ["r1"],
            "at_once": True,
        },
    }
    arms = read_arms(
        [f"grown:controller=schedule:{schedule}", "lora", "adalora", "none"], base
    )
    result = ComparisonRun(
        arms, 2, tmp_path / "out", reference="grown", task=tiny_text()
    ).run()
    grown = result.hosts["grown"][0]
    for name in ("lora", "adalora"):
        host = result.hosts[name][0]
        of_rank = size_of_rank(tiny_text().new_host())
        assert abs(host.parameters - grown.parameters) <= 1.5 * of_rank
        assert host.facts["rank"] == round(
            (grown.parameters - grown.host_parameters) / of_rank
        )
        assert abs(host.flops - grown.flops) <= host.flops / host.epochs
        assert host.loss != result.hosts["none"][0].loss


@pytest.mark.parametrize("name", ["lora", "adalora"])
def test_they_begin_with_a_trained_host(name: str, tmp_path: Path) -> None:
    arms = read_arms(["random", name], {"env": {"n_envs": 2}})
    text = f"arm '{name}': {name} begins with a host that was trained before"
    with pytest.raises(ConfigError, match=text):
        ComparisonRun(arms, 2, tmp_path / "out")


def test_without_peft_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "peft" else find(name)
    )
    with pytest.raises(ConfigError, match=r'not installed: pip install "peft>=0.18"'):
        import_peft()


def test_linear_layers_before_the_last_layer_are_adapted() -> None:
    model = nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)
    )
    host = graft(model, ["1"], "mlp")
    names, head = layers_to_adapt(host)
    assert [dict(host.named_modules())[name] for name in names] == [model[0], model[2]]
    assert head is model[4]
    assert size_of_rank(host) == (4 + 6) + (6 + 5)


def test_a_host_without_linear_layers_cannot_be_adapted() -> None:
    with pytest.raises(ConfigError, match="this host has none before its last layer"):
        layers_to_adapt(load_task("digits").build_host())
