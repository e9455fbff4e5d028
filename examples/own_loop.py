"""Growth in a custom training loop: AdamW, warm-up with a one-cycle schedule, and label smoothing on digits.

python examples/own_loop.py [EPOCHS]
"""

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import esper

EPOCHS = 30
if len(sys.argv) > 1:
    EPOCHS = int(sys.argv[1])
BATCH = 50

torch.manual_seed(0)
torch.set_num_threads(1)  # so that rounding does not depend on the number of cores
digits = load_digits()
x = (
    torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
)  # [1797, 1, 8, 8]
y = torch.tensor(digits.target)
train, validation, test = slice(0, 1000), slice(1000, 1400), slice(1400, None)

model = nn.Sequential(
    nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
    ),
    nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
    nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)),
)
parameters = nn.utils.parameters_to_vector(model.parameters()).numel()
optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=0.02, total_steps=EPOCHS * 1000 // BATCH
)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)


def right(model: nn.Module, rows: slice) -> Tensor:
    """Returns for each sample whether the model is right, [n]."""
    model.eval()
    return (model(x[rows]).argmax(1) == y[rows]).float()


grower = esper.Grower(
    model,
    sites=["0", "1"],
    optimizer=optimizer,
    controller=f"schedule:{Path(__file__).with_name('two_convolutions.toml')}",
    horizon=EPOCHS,
    scheduler=scheduler,
)
for _ in range(EPOCHS):
    model.train()
    for rows in torch.randperm(1000).split(BATCH):
        optimizer.zero_grad()
        criterion(model(x[rows]), y[rows]).backward()
        optimizer.step()
        scheduler.step()
    step = grower.step(lambda model: right(model, validation))
    done = ""
    if step.action is not None:
        done = f"  {step.action.op} {step.action.slot} {step.action.blueprint or ''}"
    print(
        f"epoch {step.epoch:3}  {100 * step.score:5.1f} %, without seeds {100 * step.without_seeds:5.1f} %{done}"
    )

network = grower.finish()
added = nn.utils.parameters_to_vector(network.parameters()).numel() - parameters
print(
    f"test: {100 * right(network, test).mean():.1f} % with {grower.kept or 'no seeds'}, {added} parameters added"
)
