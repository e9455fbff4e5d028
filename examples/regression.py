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

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 60
BATCH = 32

torch.manual_seed(0)
torch.set_num_threads(1)
features, target = load_diabetes(return_X_y=True)
rows = torch.randperm(len(target))
x, y = (
    torch.tensor(values, dtype=torch.float32)[rows] for values in (features, target)
)
train, validation, test = slice(0, 242), slice(242, 342), slice(342, None)
x, y = ((values - values[train].mean(0)) / values[train].std(0) for values in (x, y))

model = nn.Sequential(nn.Sequential(nn.Linear(10, 2), nn.Tanh()), nn.Linear(2, 1))
parameters = sum(p.numel() for p in model.parameters())
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


grower = esper.Grower(
    model,
    sites=["0"],
    optimizer=optimizer,
    controller=sys.argv[2] if len(sys.argv) > 2 else KeepWhatPays,
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

network = grower.finish()
added = sum(p.numel() for p in network.parameters()) - parameters
print(
    f"test: R² {r2(network, test).mean():.3f} with {grower.kept or 'no seeds'}, {added} parameters added"
)
