"""Growth of a regression by a custom rule: an MLP on scikit-learn's diabetes data, scored by R².

python examples/regression.py [EPOCHS [CONTROLLER]]
"""

import sys

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

import esper
from esper.agents.controller import EnvView, PerEnvController
from esper.core.action import Op

EPOCHS = 60
if len(sys.argv) > 1:
    EPOCHS = int(sys.argv[1])
BATCH = 32

torch.manual_seed(0)
torch.set_num_threads(1)
features, target = load_diabetes(return_X_y=True)
rows = torch.randperm(len(target))
x = torch.tensor(features, dtype=torch.float32)[rows]
y = torch.tensor(target, dtype=torch.float32)[rows]
train, validation, test = slice(0, 242), slice(242, 342), slice(342, None)
x = (x - x[train].mean(0)) / x[train].std(0)
y = (y - y[train].mean(0)) / y[train].std(0)

model = nn.Sequential(nn.Sequential(nn.Linear(10, 2), nn.Tanh()), nn.Linear(2, 1))
parameters = nn.utils.parameters_to_vector(model.parameters()).numel()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)


class KeepWhatPays(PerEnvController):
    """Plants a small MLP, blends it in as soon as the gates let it, and keeps it if R² gains more than its error."""

    def choose(self, env: int, view: EnvView) -> np.ndarray:
        pays = view.slot("r0c0", "contribution") > view.slot(
            "r0c0", "contribution_error"
        )
        if view.legal(Op.FOSSILIZE, "r0c0") and pays:
            return self.spec.encode(Op.FOSSILIZE, "r0c0")
        if view.legal(Op.ADVANCE, "r0c0") and view.slot("r0c0", "gate_passed"):
            return self.spec.encode(Op.ADVANCE, "r0c0")
        if view.epoch == 3:
            return self.spec.encode(Op.GERMINATE, "r0c0", "mlp", tempo=3)
        return self.spec.encode(Op.WAIT)


def r2(model: nn.Module, rows: slice) -> Tensor:
    """Returns for each sample 1 − its squared error / the variance, [n]: their mean is R²."""
    model.eval()
    return 1 - (model(x[rows]).squeeze(1) - y[rows]).square() / y[rows].var(
        correction=0
    )


controller = KeepWhatPays
if len(sys.argv) > 2:
    controller = sys.argv[2]
grower = esper.Grower(
    model,
    sites=["0"],
    optimizer=optimizer,
    controller=controller,
    horizon=EPOCHS,
    points=100,  # R² is a fraction: from 0 of a useless model to 1 of a perfect one
)
for _ in range(EPOCHS):
    model.train()
    for rows in torch.randperm(242).split(BATCH):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[rows]).squeeze(1), y[rows]).backward()
        optimizer.step()
    step = grower.step(lambda model: r2(model, validation))
    if step.action is not None:
        done = f"{step.action.op} {step.action.slot} {step.action.blueprint or ''}"
        print(
            f"epoch {step.epoch:3}  R² {step.score:.3f}, without the seed {step.without_seeds:.3f}  {done}"
        )

network = grower.finish(quiet=True)
added = nn.utils.parameters_to_vector(network.parameters()).numel() - parameters
print(
    f"test: R² {r2(network, test).mean():.3f} with {grower.kept or 'no seeds'}, {added} parameters added"
)
