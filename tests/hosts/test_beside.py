"""A frozen host with another network that learns beside it."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from esper.data.tasks import load_task
from esper.hosts.beside import (
    DISTILLED_SHARE,
    TEMPERATURE,
    BesideHost,
    Distilled,
    Ensemble,
)


def beside(kind: type[BesideHost]) -> tuple[BesideHost, torch.Tensor, torch.Tensor]:
    task = load_task("digits")
    torch.manual_seed(0)
    return (
        kind(task.build_host(), task.build_host()),
        task.validation.x[:32],
        task.validation.y[:32],
    )


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
    share = DISTILLED_SHARE
    loss = (1 - share) * F.cross_entropy(
        logits, y
    ) + share * TEMPERATURE**2 * divergence
    for ours, wanted in zip(found, torch.autograd.grad(loss, parameters), strict=True):
        assert torch.allclose(ours, wanted, rtol=1e-4, atol=1e-5)


def test_what_remains_of_distillation_is_the_pupil() -> None:
    pupil, x, _ = beside(Distilled)
    pupil.eval()
    assert torch.equal(pupil(x), pupil.learner(x))
    assert pupil.parameter_count == 277
