"""Growth of a torchvision ResNet: seeds after its stages, in a training loop of one's own, on digits.

python examples/resnet.py [EPOCHS]
"""

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import esper
from esper.hosts.torchvision_shim import import_torchvision

resnet = import_torchvision("torchvision.models.resnet")  # works with a CPU build of torch, too

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 16
BATCH = 50

torch.manual_seed(0)
digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1  # [1797, 1, 8, 8]
y = torch.tensor(digits.target)
train, validation, test = slice(0, 300), slice(300, 600), slice(600, None)

model = resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=10)  # ten layers
model.conv1 = nn.Conv2d(1, 64, 3, padding=1, bias=False)  # for small grey images
parameters = sum(p.numel() for p in model.parameters())
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4, nesterov=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)


def right(model: nn.Module, rows: slice) -> Tensor:
    """Returns for each sample whether the model is right, [n]."""
    model.eval()
    return (model(x[rows]).argmax(1) == y[rows]).float()


grower = esper.Grower(
    model,
    sites={"r0c0": "layer1", "r0c1": "layer2"},
    optimizer=optimizer,
    controller=f"schedule:{Path(__file__).with_name('two_convolutions.toml')}",
    horizon=EPOCHS,
    scheduler=scheduler,
)
for _ in range(EPOCHS):
    model.train()
    for rows in torch.randperm(300).split(BATCH):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    scheduler.step()
    step = grower.step(lambda model: right(model, validation))
    done = "" if step.action is None else f"  {step.action.op} {step.action.slot} {step.action.blueprint or ''}"
    print(f"epoch {step.epoch:3}  {100 * step.score:5.1f} %, without seeds {100 * step.alone:5.1f} %{done}")

network = grower.finish()
added = sum(p.numel() for p in network.parameters()) - parameters
print(f"test: {100 * right(network, test).mean():.1f} % with {grower.kept or 'no seeds'}, {added} parameters added")
print(f"{type(network).__name__}: {', '.join(name for name, _ in network.named_children())}")
