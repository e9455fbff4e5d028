"""Controls that compute as much as the grown host, and those that begin with a trained one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from benchmarks import alternatives
from benchmarks.alternatives import (
    DISTILLED_SHARE,
    TEMPERATURE,
    BesideHost,
    Distilled,
    Ensemble,
    UniformRunner,
    widen_as_copies,
)
from esper.compare.arms import read_arms
from esper.compare.comparison import ComparisonResult
from esper.compare.comparison_run import ComparisonRun
from esper.compare.controls import CONTROLS, register
from esper.compare.runner import HostResult
from esper.config import ConfigError, TrainingConfig
from esper.data import digits
from esper.data.tasks import build_host, load_task
from esper.env.make import EnvMaker
from esper.hosts.cnn import CNNHost
from esper.hosts.host import Host

SCHEDULE = """
[[action]]
epoch = 0
op = "GERMINATE"
slot = "r2c0"
blueprint = "widen_whole"
[[action]]
epoch = 1
op = "GERMINATE"
slot = "r2c1"
blueprint = "widen_half"
"""
NEW = (
    "static-compute",
    "bigger-compute",
    "uniform",
    "net2net",
    "ensemble",
    "distilled",
    "bigger-trained",
)


def play(
    folder: Path,
    *texts: str,
    base: dict[str, Any] | None = None,
    pairs: int = 2,
    **given: Any,
) -> ComparisonResult:
    (folder / "s.toml").write_text(SCHEDULE)
    task = {"start": "trained", "samples_per_epoch": 256, "data": str(folder / "data")}
    env = {"n_envs": 2, "episode_length": 6, "baseline_episodes": 1}
    arms = read_arms(
        [f"grown:controller=schedule:{folder / 's.toml'}", *texts],
        base or {"task": task, "env": env},
    )
    return ComparisonRun(arms, pairs, folder / "out", reference="grown", **given).run()


@cache
def found() -> ComparisonResult:
    task = replace(load_task("digits"), episode_length=4)
    with TemporaryDirectory() as folder:
        return play(Path(folder), *NEW, "same-compute", "none", task=task)


def equal_compute(found: ComparisonResult, name: str) -> bool:
    """Whether the hosts of an arm compute what the grown hosts do, to an epoch."""
    close = True
    for ours, other in zip(found.hosts["grown"], found.hosts[name], strict=True):
        an_epoch = other.flops / (other.epochs + 0.3)
        close &= abs(other.flops - ours.flops) <= an_epoch
    return close


@pytest.mark.slow
def test_from_new_weights_each_computes_as_much_as_the_grown_host(
    tmp_path: Path,
) -> None:
    env = {"n_envs": 1, "episode_length": 4, "baseline_episodes": 1}
    base = {"task": {"samples_per_epoch": 64}, "env": env}
    result = play(tmp_path, *NEW[:3], base=base, pairs=1)
    for name in NEW[:3]:
        assert equal_compute(result, name)
        assert result.hosts[name][0].facts["wanted_flops"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NEW)
def test_each_computes_as_much_as_the_grown_host(name: str) -> None:
    assert equal_compute(found(), name)
    assert all(len(host.kept) == 2 for host in found().hosts["grown"])


@pytest.mark.slow
def test_the_hosts_start_where_the_host_alone_starts() -> None:
    from_new = min(host.accuracy for host in found().hosts["bigger-compute"])
    for name in ("net2net", "ensemble", "same-compute", "none", "bigger-trained"):
        assert all(host.accuracy > from_new for host in found().hosts[name]), name


@pytest.mark.slow
def test_their_sizes() -> None:
    sizes = {name: hosts[0].parameters for name, hosts in found().hosts.items()}
    assert sizes["static-compute"] == sizes["grown"] > sizes["none"] == 277
    assert sizes["ensemble"] == 2 * 277
    for name in ("net2net", "bigger-compute", "distilled", "bigger-trained"):
        assert sizes[name] == 635


@pytest.mark.parametrize("added", [0, 400, 10_000])
def test_uniform_has_the_blueprint_and_the_row_of_the_nearest_size(added: int) -> None:
    config = TrainingConfig.parse({"run": {"controller": "random"}})
    runner = UniformRunner(EnvMaker.of(config), "grown", 0)
    grown = HostResult(0.0, 0.0, 277.0 + added, 277.0, 0.0, 30.0, 0.0, 1.0)
    task, _, facts = runner.make(grown)
    slots, names = list(facts["built_in"]), set(facts["built_in"].values())
    row = slots[0][:2]
    assert slots == [place.name for place in runner._rows()[row]]
    assert len(names) == 1
    host = task.build_host()
    host.probe(task.sample)
    missed = abs(host.parameter_count - grown.parameters)
    assert missed == min(
        abs(size - added) for size in runner._sizes(runner._rows()).values()
    )


@pytest.mark.parametrize("name", ["net2net", "ensemble", "distilled"])
def test_those_that_begin_with_a_trained_host_need_one(
    name: str, tmp_path: Path
) -> None:
    text = f"arm '{name}': {name} begins with a host that was trained before"
    with pytest.raises(ConfigError, match=text):
        play(tmp_path, name, base={"env": {"n_envs": 2}})


def test_a_ceiling_has_a_first_training_of_its_own(tmp_path: Path) -> None:
    text = r"bigger-trained has a first training, too: set task\.start to trained"
    with pytest.raises(ConfigError, match=text):
        play(tmp_path, "bigger-trained", base={"env": {"n_envs": 2}})


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ConfigError, match="there is a control named uniform already"):
        register(type("Another", (UniformRunner,), {}))
    assert {"static", "bigger", "same-compute", *NEW} <= set(CONTROLS)


def beside(kind: type[BesideHost]) -> tuple[BesideHost, torch.Tensor, torch.Tensor]:
    task = load_task("digits")
    torch.manual_seed(0)
    split = task.validation
    return kind(task.build_host(), task.build_host()), split.x[:32], split.y[:32]


def test_an_ensemble_averages_the_probabilities_of_both() -> None:
    ensemble, x, _ = beside(Ensemble)
    ensemble.eval()
    mean = (ensemble.host(x).softmax(1) + ensemble.learner(x).softmax(1)) / 2
    assert torch.allclose(ensemble(x).exp(), mean, atol=1e-6)
    assert ensemble.parameter_count == 2 * 277


def test_its_learner_trains_on_its_own_outputs() -> None:
    ensemble, x, _ = beside(Ensemble)
    ensemble.train()
    assert torch.equal(ensemble(x), ensemble.learner(x))
    assert not ensemble.host.training
    assert not any(parameter.requires_grad for parameter in ensemble.host.parameters())


def test_a_pupil_has_the_gradient_of_the_loss_of_distillation() -> None:
    pupil, x, y = beside(Distilled)
    pupil.train()
    parameters = list(pupil.learner.parameters())
    found = torch.autograd.grad(F.cross_entropy(pupil(x), y), parameters)
    logits = pupil.learner(x)
    teacher = (pupil.host(x) / TEMPERATURE).log_softmax(1)
    divergence = F.kl_div(
        (logits / TEMPERATURE).log_softmax(1),
        teacher,
        log_target=True,
        reduction="batchmean",
    )
    alone = (1 - DISTILLED_SHARE) * F.cross_entropy(logits, y)
    loss = alone + DISTILLED_SHARE * TEMPERATURE**2 * divergence
    for ours, wanted in zip(found, torch.autograd.grad(loss, parameters), strict=True):
        assert torch.allclose(ours, wanted, rtol=1e-4, atol=1e-5)


def test_what_remains_of_distillation_is_the_pupil() -> None:
    pupil, x, _ = beside(Distilled)
    pupil.eval()
    assert torch.equal(pupil(x), pupil.learner(x))
    assert pupil.parameter_count == 277


def moved(host: Host) -> Host:
    """The host with statistics and norms that are not those of a new one."""
    with torch.no_grad():
        for tensor in (*host.parameters(), *host.buffers()):
            if tensor.is_floating_point():
                tensor.add_(0.3 * torch.rand_like(tensor))
    return host.eval()


def cnn(base: int, blocks: int = 3) -> CNNHost:
    return CNNHost(1, 10, base=base, blocks=blocks)


@pytest.mark.parametrize("kind", ["fused norms", "plain norms", "mlp"])
def test_a_wide_host_computes_what_the_narrow_one_does(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alternatives, "NOISE", 0.0)
    torch.manual_seed(0)
    x = torch.randn(4, 1, 16, 16)
    if kind == "mlp":
        narrow, wide = digits.mlp_of_widths(5, 7), digits.mlp_of_widths(9, 16)
        x = load_task("digits_table").sample
    else:
        base = 8 if kind == "fused norms" else 3
        narrow, wide = cnn(base), cnn(2 * base)
    moved(narrow)
    widen_as_copies(narrow, wide.eval())
    assert torch.allclose(narrow(x), wide(x), rtol=1e-4, atol=1e-4)


def test_copies_differ_by_noise_so_that_they_can_learn_different_things() -> None:
    torch.manual_seed(0)
    narrow, wide = cnn(3, 2), cnn(6, 2)
    widen_as_copies(narrow, wide)
    old, new = next(narrow.parameters()), next(wide.parameters())
    assert torch.equal(new[:3], old)
    distances = torch.cdist(new[3:].flatten(1), old.flatten(1)).min(dim=1).values
    assert ((distances > 0) & (distances < 0.2)).all()


def test_hosts_that_are_no_chain_of_layers_are_refused() -> None:
    text = r"widens chains of convolutions, linear layers and BatchNorms; this host has a [A-Z]"
    with pytest.raises(ConfigError, match=text):
        widen_as_copies(build_host("chars"), build_host("chars"))
    with pytest.raises(ConfigError, match="these two hosts have different ones"):
        widen_as_copies(cnn(3, 2), cnn(3, 3))
