"""Growth in a Lightning Trainer equals that in a plain loop, and a checkpoint continues it to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from tests.grower.loops import BATCH, GROWS, LENIENT, SITES, Net, X, Y, net, same, scores, weights

pl = pytest.importorskip("lightning.pytorch")
from esper.integrations.lightning import GrowthCallback  # noqa: E402

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
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)]


class ByHand(Module):
    automatic_optimization = False


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), BATCH)


def growth(**options: Any) -> GrowthCallback:
    sites = {name: f"net.{path}" for name, path in SITES.items()}
    options = {"controller": GROWS, "topology": "mlp", "config": LENIENT, **options}
    return GrowthCallback(sites, lambda module, batch: module.net(batch[0]).argmax(1) == batch[1], **options)


def fit(
    folder: Path, callback: GrowthCallback, module: Any = None, path: Path | None = None, **options: Any
) -> tuple[Any, Any]:
    """Returns the module after training, and its trainer."""
    module = module or Module()
    saves = pl.callbacks.ModelCheckpoint(
        folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=options.pop("at_the_end", None)
    )
    trainer = pl.Trainer(
        callbacks=[saves, callback],
        logger=False,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": EPOCHS, "devices": 1, **options},
    )
    trainer.fit(module, data(), data(), ckpt_path=path)
    return module, trainer


def test_a_trainer_grows_the_same_as_a_plain_loop(tmp_path: Path) -> None:
    """The bits are the same, also if the Trainer clips all parameters of the optimizer."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    grower = esper.Grower(model, SITES, optimizer, GROWS, EPOCHS, topology="mlp", config=LENIENT, scheduler=scheduler)
    steps = []
    for _ in range(EPOCHS):
        model.train()
        for rows in torch.arange(len(X)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(X[rows]), Y[rows]).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
        steps.append(grower.step(scores))
        scheduler.step()
    callback = growth()
    module, trainer = fit(tmp_path, callback, gradient_clip_val=0.3)
    assert callback.steps == steps
    grower.finish()
    assert same(weights(module.net), weights(model))
    assert callback.grower is not None
    assert callback.grower.kept == {"r0c0": "mlp_small"}
    trainer.validate(module, data(), verbose=False)  # the grown module is an ordinary one


@pytest.mark.parametrize(("at_the_end", "epoch"), [(None, 7), (False, 2)], ids=["epoch", "validation"])
def test_a_checkpoint_continues_to_the_same_bits(tmp_path: Path, epoch: int, at_the_end: bool | None) -> None:
    whole = growth()
    module, _ = fit(tmp_path, whole, at_the_end=at_the_end)
    rest = growth()
    again, _ = fit(tmp_path / "rest", rest, path=tmp_path / f"epoch={epoch}.ckpt", at_the_end=at_the_end)
    assert rest.steps == whole.steps[epoch + 1 :]
    assert same(weights(module), weights(again))


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
