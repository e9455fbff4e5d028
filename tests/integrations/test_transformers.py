"""Growth in the Trainer of transformers, and checkpoints that continue it to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import esper
from tests.grower.loops import (
    BATCH,
    GROWS,
    LENIENT,
    SITES,
    X,
    Y,
    net,
    plant,
    same,
    script,
    weights,
)

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from esper.integrations.transformers import FILE, GrowthTrainerCallback  # noqa: E402

EPOCHS = 14
STEPS = len(X) // BATCH
"""Optimizer steps in an epoch."""


class Classifier(nn.Module):
    """Returns loss and logits, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.net(x)
        return (
            {"logits": logits}
            if labels is None
            else {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}
        )


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"x": X[row], "labels": Y[row]}


def right(model: Any, batch: Any) -> Tensor:
    return model(batch["x"])["logits"].argmax(1) == batch["labels"]


def growth(**options: Any) -> GrowthTrainerCallback:
    sites = {name: f"net.{path}" for name, path in SITES.items()}
    return GrowthTrainerCallback(
        sites,
        right,
        **{"controller": GROWS, "topology": "mlp", "config": LENIENT, **options},
    )


def train(
    folder: Path,
    callback: GrowthTrainerCallback,
    resume: Path | None = None,
    **options: Any,
) -> Any:
    """Returns the Trainer after training."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        per_device_train_batch_size=BATCH,
        learning_rate=0.01,
        **{
            "num_train_epochs": EPOCHS,
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
            **options,
        },
    )
    trainer = transformers.Trainer(
        Classifier(),
        arguments,
        train_dataset=Rows(),
        eval_dataset=Rows(),
        callbacks=[callback],
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def test_a_trainer_grows_a_seed_and_a_checkpoint_continues_to_the_same_bits(
    tmp_path: Path,
) -> None:
    """One checkpoint has a seed in its optimizer, which the Trainer loads before there is a Grower."""
    whole = growth()
    trained = train(tmp_path, whole)
    assert [step.slots["r0c0"].stage for step in whole.steps][-1] == "FOSSILIZED"
    assert whole.grower is not None
    assert whole.grower.kept == {"r0c0": "mlp_small"}
    assert any("grown_seeds." in name for name in trained.model.state_dict())
    assert torch.isfinite(trained.model(X)["logits"]).all()
    trained.evaluate()  # after training, nothing grows
    assert len(whole.steps) == EPOCHS
    for epoch in (3, 8):
        rest = growth()
        again = train(tmp_path, rest, tmp_path / f"checkpoint-{epoch * STEPS}")
        assert rest.steps == whole.steps[epoch:]
        assert same(weights(again.model), weights(trained.model))


def test_evaluations_by_steps_count_as_epochs_of_growth(tmp_path: Path) -> None:
    callback = growth()
    train(
        tmp_path,
        callback,
        num_train_epochs=4,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
    )
    assert len(callback.steps) == 4 * STEPS // 2
    assert callback.steps[-1].done


def test_a_checkpoint_without_growth_is_refused(tmp_path: Path) -> None:
    train(tmp_path, growth(), num_train_epochs=2)
    (tmp_path / f"checkpoint-{STEPS}" / FILE).unlink()
    with pytest.raises(esper.ConfigError, match=rf"{FILE} does not exist"):
        train(tmp_path, growth(), tmp_path / f"checkpoint-{STEPS}", num_train_epochs=2)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"load_best_model_at_end": True},
            "does not work with .* load_best_model_at_end",
        ),
        ({"eval_strategy": "no"}, "set eval_strategy"),
        ({"torch_compile": True}, "does not work with .* torch_compile"),
    ],
)
def test_impossible_arguments_are_refused_before_training(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(esper.ConfigError, match=reason):
        train(tmp_path, growth(), **options)


def test_the_log_has_the_numbers_of_growth_and_seeds_merge_at_the_end(
    tmp_path: Path,
) -> None:
    callback = GrowthTrainerCallback(
        ["net.body.0 -> net.body.2"],
        right,
        merge=True,
        controller=script({0: plant("r2c0", "widen_half")}),
        topology="mlp",
    )
    trainer = train(tmp_path, callback, num_train_epochs=4)
    assert trainer.model.net.body[0].out_features == 18
    assert not any("grown_seeds." in name for name in trainer.model.state_dict())
    of_growth = [one for one in trainer.state.log_history if "growth/kept" in one]
    assert len(of_growth) == 5, "after each evaluation, and at the end"
    assert of_growth[-1]["growth/units/net.body.0"] == 18
