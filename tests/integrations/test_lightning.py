"""Growth in a Lightning Trainer equals that in a plain loop, and a checkpoint continues it to the same bits."""

from __future__ import annotations

import copy
import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.hosts.seed_hook import hooks_of
from tests.grower.loops import (
    BATCH,
    GROWS,
    LENIENT,
    SITES,
    Net,
    X,
    Y,
    net,
    plant,
    same,
    scores,
    script,
    weights,
)

pl = pytest.importorskip("lightning.pytorch")
from esper.integrations.lightning import GrowthCallback, load_from_checkpoint  # noqa: E402

EPOCHS = 14


class Module(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net: Net = net()

    def training_step(self, batch: Any, _index: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, _index: int) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        return [optimizer], [
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
        ]


class ByHand(Module):
    automatic_optimization = False


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), BATCH)


def growth(**options: Any) -> GrowthCallback:
    sites = {name: f"net.{path}" for name, path in SITES.items()}
    options = {"controller": GROWS, "topology": "mlp", "config": LENIENT, **options}
    return GrowthCallback(
        sites,
        lambda module, batch: module.net(batch[0]).argmax(1) == batch[1],
        **options,
    )


def fit(
    folder: Path,
    callback: GrowthCallback,
    module: Any = None,
    path: Path | None = None,
    beside: tuple[Any, ...] = (),
    **options: Any,
) -> tuple[Any, Any]:
    """Returns the module after training, and its trainer; ``beside`` are more callbacks."""
    module = module or Module()
    saves = pl.callbacks.ModelCheckpoint(
        folder,
        filename="{epoch}",
        save_top_k=-1,
        save_on_train_epoch_end=options.pop("at_the_end", None),
    )
    trainer = pl.Trainer(
        callbacks=[saves, callback, *beside],
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": EPOCHS, "devices": 1, "logger": False, **options},
    )
    trainer.fit(module, data(), data(), ckpt_path=path)
    return module, trainer


def test_a_trainer_grows_the_same_as_a_plain_loop(tmp_path: Path) -> None:
    """The bits are the same, also if the Trainer clips the parameters of the optimizer, seeds that are on included."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    grower = esper.Grower(
        model,
        SITES,
        optimizer,
        GROWS,
        EPOCHS,
        topology="mlp",
        config=LENIENT,
        scheduler=scheduler,
    )
    steps = [grower.start(scores)]
    for _ in range(EPOCHS):
        model.train()
        for rows in torch.arange(len(X)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(X[rows]), Y[rows]).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(
                [p for group in optimizer.param_groups for p in group["params"]], 0.3
            )
            optimizer.step()
        steps.append(grower.step(scores))
        scheduler.step()
    callback = growth()
    module, trainer = fit(tmp_path, callback, gradient_clip_val=0.3)
    assert [str(step).replace("net.", "") for step in callback.steps] == [
        str(step) for step in steps
    ]
    for own, other in zip(
        callback.steps, steps, strict=True
    ):  # the network is a part of the module
        slots = {
            name: replace(slot, path=other.slots[name].path)
            for name, slot in own.slots.items()
        }
        assert replace(own, slots=slots) == other
    grower.finish()
    assert same(weights(module.net), weights(model))
    assert callback.grower is not None
    assert callback.grower.kept == {"r0c0": "mlp_small"}
    trainer.validate(
        module, data(), verbose=False
    )  # the grown module is an ordinary one


@pytest.mark.parametrize(
    ("at_the_end", "epoch"), [(None, 7), (False, 2)], ids=["epoch", "validation"]
)
def test_a_checkpoint_continues_to_the_same_bits(
    tmp_path: Path, epoch: int, at_the_end: bool | None
) -> None:
    whole = growth()
    module, _ = fit(tmp_path, whole, at_the_end=at_the_end)
    rest = growth()
    again, _ = fit(
        tmp_path / "rest",
        rest,
        path=tmp_path / f"epoch={epoch}.ckpt",
        at_the_end=at_the_end,
    )
    assert rest.steps == whole.steps[epoch + 2 :], (
        "the first decision came before the first epoch"
    )
    assert same(weights(module), weights(again))


@pytest.mark.parametrize(
    "name", ["StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging"]
)
def test_averages_of_weights_are_refused_before_training_and_go_on_after_growth(
    tmp_path: Path, name: str
) -> None:
    kind = getattr(pl.callbacks, name, None)
    if kind is None:
        pytest.skip(f"this lightning has no {name}")
    average = {"swa_lrs": 0.01} if name == "StochasticWeightAveraging" else {}
    fresh = Module()
    before = weights(fresh)
    with pytest.raises(esper.ConfigError, match=f"growth does not go with {name}"):
        fit(tmp_path, growth(), fresh, beside=(kind(**average),))
    assert same(weights(fresh), before)
    module, _ = fit(tmp_path, growth())
    seeds = len(list(hooks_of(module)))
    assert seeds == 1
    later = pl.Trainer(
        callbacks=[kind(**average)],
        max_epochs=3,
        logger=False,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    later.fit(module, data(), data())
    assert len(list(hooks_of(module))) == seeds


def test_a_controller_first_decides_after_the_first_epoch_if_it_is_not_to_start(
    tmp_path: Path,
) -> None:
    callback = growth(start=False)
    fit(tmp_path, callback, max_epochs=2)
    assert [step.epoch for step in callback.steps] == [1, 2]


def test_impossible_arguments_are_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(esper.ConfigError, match="one optimizer that the Trainer steps"):
        fit(tmp_path, growth(), ByHand())
    with pytest.raises(esper.ConfigError, match="growth needs validation"):
        fit(tmp_path, growth(), limit_val_batches=0)
    with pytest.raises(esper.ConfigError, match="pass horizon="):
        fit(tmp_path, growth(), check_val_every_n_epoch=2)
    callback = growth()
    callback.sites = {"r0c0": "nothing"}
    with pytest.raises(esper.ConfigError, match="no submodule"):
        fit(tmp_path, callback)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_checkpoint_of_any_epoch_is_tested_with_the_seeds_that_were_on_then(
    tmp_path: Path, fresh: bool
) -> None:
    seen: dict[int, torch.Tensor] = {}

    class Sees(GrowthCallback):
        """Notes the outputs of the module when a checkpoint is saved."""

        def on_save_checkpoint(
            self, trainer: Any, pl_module: Any, checkpoint: Any
        ) -> None:
            super().on_save_checkpoint(trainer, pl_module, checkpoint)
            seen[trainer.current_epoch] = (
                copy.deepcopy(pl_module.net).eval()(X).detach()
            )

    first = growth()
    callback = Sees(first.sites, first.score, **first.options)
    module, trainer = fit(tmp_path, callback, at_the_end=False)
    for epoch in (0, 5, EPOCHS - 1):
        file = tmp_path / f"epoch={epoch}.ckpt"
        if fresh:
            module, trainer = (
                Module(),
                pl.Trainer(
                    callbacks=[growth()], logger=False, accelerator="cpu", devices=1
                ),
            )
        trainer.validate(module, data(), ckpt_path=file, verbose=False)
        with torch.no_grad():
            assert torch.equal(module.net.eval()(X), seen[epoch])
    assert {hook.name for _, _, hook in hooks_of(module)} == {"r0c0"}


class Called(Module):
    """A module that is called itself."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, _index: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class Numbers(pl.loggers.logger.DummyLogger):  # type: ignore[misc]
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.seen.append(metrics)


def test_loggers_get_the_numbers_of_growth_and_seeds_merge_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = Numbers()
    callback = GrowthCallback(
        ["net.body.0 -> net.body.2"],
        lambda module, batch: module(batch[0]).argmax(1) == batch[1],
        merge=True,
        controller=script({0: plant("r2c0", "widen_half")}),
        topology="mlp",
    )
    module, _ = fit(tmp_path, callback, Called(), max_epochs=4, logger=numbers)
    assert module.net.body[0].out_features == 18
    of_growth = [one for one in numbers.seen if "growth/kept" in one]
    assert len(of_growth) == 6, "before training, with each validation, and at the end"
    assert of_growth[-1]["growth/units/net.body.0"] == 18
    assert "net.body.0: 12 -> 18 units" in capsys.readouterr().out


@pytest.mark.parametrize("merge", [False, True])
def test_a_checkpoint_is_loaded_without_a_trainer_with_its_seeds_and_widths(
    tmp_path: Path, merge: bool
) -> None:
    seen: dict[str, Tensor] = {}

    class Sees(pl.Callback):  # type: ignore[misc]
        def on_save_checkpoint(
            self, trainer: Any, pl_module: Any, _checkpoint: Any
        ) -> None:
            with torch.no_grad():
                seen[f"epoch={trainer.current_epoch}.ckpt"] = copy.deepcopy(
                    pl_module.net
                ).eval()(X)

    wider = script({0: plant("r2c0", "widen_half"), 1: plant("r0c1")})
    callback = GrowthCallback(
        {"r2c0": "net.body.0 -> net.body.2", "r0c1": "net.body.2"},
        lambda module, batch: module(batch[0]).argmax(1) == batch[1],
        merge=merge,
        controller=wider,
        config={"env": {"gates": {"trial_standard_errors": 1000.0}}},
    )
    module, trainer = fit(
        tmp_path, callback, Called(), beside=(Sees(),), at_the_end=False
    )
    assert module.net.body[0].out_features == (18 if merge else 12)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    with torch.no_grad():
        seen["end.ckpt"] = module.net.eval()(X)
    for name in ("epoch=0.ckpt", f"epoch={EPOCHS - 1}.ckpt", "end.ckpt"):
        loaded = load_from_checkpoint(Called, tmp_path / name)
        assert type(loaded) is Called
        with torch.no_grad():
            assert torch.equal(loaded.net.eval()(X), seen[name]), name
        trainer.validate(module, data(), ckpt_path=tmp_path / name, verbose=False)
        with torch.no_grad():
            assert torch.equal(module.net.eval()(X), seen[name]), name


def test_a_checkpoint_without_growth_is_refused(tmp_path: Path) -> None:
    trainer = pl.Trainer(
        max_epochs=1,
        logger=False,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    trainer.fit(Module(), data())
    trainer.save_checkpoint(tmp_path / "alone.ckpt")
    with pytest.raises(
        esper.ConfigError,
        match=r"nothing has grown in .* load it by Module.load_from_checkpoint",
    ):
        load_from_checkpoint(Module, tmp_path / "alone.ckpt")


def test_growth_is_logged_in_the_row_of_its_validation(tmp_path: Path) -> None:
    logger = pl.loggers.CSVLogger(tmp_path)
    fit(tmp_path, growth(), max_epochs=3, logger=logger)
    with open(Path(logger.log_dir) / "metrics.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["growth/score"]]
    assert [row["epoch"] for row in rows] == ["0", "0", "1", "2", "3"]
    assert [bool(row["accuracy"]) for row in rows] == [False, True, True, True, False]
