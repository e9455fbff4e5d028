"""Blended seeds of the case `validate`, and its two ways to evaluate them."""

from __future__ import annotations

import torch

from esper.attribution.counterfactual import CounterfactualHelper
from esper.bench import validate
from esper.bench.fixtures import growth_env, image_task
from esper.seeds.site import Role
from esper.training.validate import evaluate

CPU = torch.device("cpu")


def test_configurations_evaluated_together_and_separately_agree() -> None:
    task = image_task(8, 2, CPU, validation=20)
    with growth_env(task, envs=1, batch=4) as env:
        host = env.training[0]
        validate.blend(host)
        assert sum(site.role is Role.BLENDED for site in host.sites) == 3
        everything = CounterfactualHelper().plan(host.sites, costly=True)
        assert len(set(everything)) == 8
        together = evaluate(host, task.validation, everything)
        for row, configuration in enumerate(everything):
            alone = evaluate(host, task.validation, [configuration])
            assert torch.equal(together.correct[row], alone.correct[0])
            torch.testing.assert_close(together.loss[row], alone.loss[0])
