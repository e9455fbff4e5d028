"""Growth of a frozen torchvision ResNet: trained on the digits 0 to 4, it grows seeds between its stages for 5 to 9.

python examples/resnet.py [EPOCHS [CONTROLLER]]
"""

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import esper
from esper.hosts.zoo import import_torchvision

resnet = import_torchvision(
    "torchvision.models.resnet"
)  # works with a CPU build of torch, too

EPOCHS = 20
if len(sys.argv) > 1:
    EPOCHS = int(sys.argv[1])
controller = f"schedule:{Path(__file__).with_name('two_convolutions.toml')}"
if len(sys.argv) > 2:
    controller = sys.argv[2]
BATCH = 50

torch.manual_seed(0)
digits = load_digits()
x = (
    torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
)  # [1797, 1, 8, 8]
y = torch.tensor(digits.target)
old, new = (y < 5).nonzero().squeeze(1), (y >= 5).nonzero().squeeze(1)
train, validation, test = new[:300], new[300:600], new[600:]

model = resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=5)  # ten layers
model.conv1 = nn.Conv2d(1, 64, 3, padding=1, bias=False)  # for small grey images
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
for _ in range(50):
    rows = old[torch.randint(len(old), (BATCH,))]
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
    optimizer.step()

model.requires_grad_(False)
frozen = [module for module in model.children() if module is not model.fc]
model.fc = nn.Linear(512, 5)
parameters = nn.utils.parameters_to_vector(model.parameters()).numel()
optimizer = torch.optim.AdamW(model.fc.parameters(), lr=3e-3)


def right(model: nn.Module, rows: Tensor) -> Tensor:
    """Returns for each sample whether the model is right, [n]."""
    model.eval()
    return (model(x[rows]).argmax(1) == y[rows] - 5).float()


grower = esper.Grower(
    model,
    sites=["layer1", "layer2"],
    optimizer=optimizer,
    controller=controller,
    horizon=EPOCHS,
)
for _ in range(EPOCHS):
    model.train()
    for module in frozen:
        module.eval()  # BatchNorm keeps what it has learned
    for rows in train[torch.randperm(len(train))].split(BATCH):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows] - 5).backward()
        optimizer.step()
    step = grower.step(lambda model: right(model, validation))
    done = ""
    if step.action is not None:
        done = f"  {step.action.op} {step.action.slot} {step.action.blueprint or ''}"
    print(
        f"epoch {step.epoch:3}  {100 * step.score:5.1f} %, without seeds {100 * step.without_seeds:5.1f} %{done}"
    )

network = grower.finish(quiet=True)
added = nn.utils.parameters_to_vector(network.parameters()).numel() - parameters
print(
    f"test: {100 * right(network, test).mean():.1f} % with {grower.kept or 'no seeds'}, {added} parameters added"
)
