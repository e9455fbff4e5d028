"""Growth in a loop that accelerate prepares: devices and mixed precision are its, gradients are accumulated.

python examples/accelerate_loop.py [EPOCHS]
torchrun --nproc_per_node 2 examples/accelerate_loop.py [EPOCHS]
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper

EPOCHS = 30
if len(sys.argv) > 1:
    EPOCHS = int(sys.argv[1])

torch.manual_seed(0)
digits = load_digits()
x = (
    torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
)  # [1797, 1, 8, 8]
y = torch.tensor(digits.target)
splits = slice(1000), slice(1000, 1400), slice(1400, None)
train, validation, test = (TensorDataset(x[rows], y[rows]) for rows in splits)

model = nn.Sequential(
    nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
    ),
    nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
    nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)),
)
accelerator = Accelerator(gradient_accumulation_steps=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * 20)
loader = DataLoader(train, batch_size=25, shuffle=True)
model, optimizer, scheduler, loader = accelerator.prepare(
    model, optimizer, scheduler, loader
)


def right(model: nn.Module, data: TensorDataset) -> Tensor:
    """Returns for each sample whether the model is right, [n]."""
    model.eval()
    inputs, targets = (tensor.to(accelerator.device) for tensor in data.tensors)
    return (model(inputs).argmax(1) == targets).float()


grower = esper.Grower(
    model,
    sites=["0", "1"],
    optimizer=optimizer,
    controller=f"schedule:{Path(__file__).with_name('two_convolutions.toml')}",
    horizon=EPOCHS,
    scheduler=scheduler,
    scaler=accelerator.scaler,
)
for _ in range(EPOCHS):
    model.train()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    step = grower.step(lambda model: right(model, validation))
    done = ""
    if step.action is not None:
        done = f"  {step.action.op} {step.action.slot} {step.action.blueprint or ''}"
    accelerator.print(f"epoch {step.epoch:3}  {100 * step.score:5.1f} %{done}")

network = grower.finish(quiet=True)
accelerator.print(
    f"test: {100 * right(network, test).mean():.1f} % with {grower.kept or 'no seeds'}"
)
