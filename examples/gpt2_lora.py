"""A GPT-2 from a config grows LoRA seeds in a custom training loop, which are then merged into its weights.

The text is that of the task `chars`: the help texts that ship with Python. Nothing is downloaded.

pip install -e ".[integrations]"; python examples/gpt2_lora.py [EPOCHS]
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import esper
from esper.data.tasks import load_task

EPOCHS = 16
if len(sys.argv) > 1:
    EPOCHS = int(sys.argv[1])
BATCH, STEPS, SEQUENCES = 16, 25, 128

torch.manual_seed(0)
chars = load_task("chars")
train, validation, test = chars.train, chars.validation, chars.test
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=chars.classes,
        n_positions=64,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
)
parameters = nn.utils.parameters_to_vector(model.parameters()).numel()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=3e-3, total_steps=EPOCHS * STEPS
)


def right(model: nn.Module, split: esper.Split) -> Tensor:
    """Returns for each of 128 sequences the share of characters that the model predicts, [128]."""
    model.eval()
    rows = split.evenly_spaced(SEQUENCES)
    return (model(rows.x).logits.argmax(2) == rows.y).float().mean(1)


grower = esper.Grower(
    model,
    sites=[f"transformer.h.{i}.mlp.c_proj" for i in range(2)],
    optimizer=optimizer,
    controller=f"schedule:{Path(__file__).with_name('two_loras.toml')}",
    horizon=EPOCHS,
    scheduler=scheduler,
)
for _ in range(EPOCHS):
    model.train()
    for rows in torch.randperm(len(train))[: STEPS * BATCH].split(BATCH):
        optimizer.zero_grad()
        logits = model(train.x[rows]).logits
        nn.functional.cross_entropy(
            logits.flatten(0, 1), train.y[rows].flatten()
        ).backward()
        optimizer.step()
        scheduler.step()
    step = grower.step(lambda model: right(model, validation))
    done = ""
    if step.action is not None:
        done = f"  {step.action.op} {step.action.slot} {step.action.blueprint or ''}"
    print(
        f"epoch {step.epoch:3}  {100 * step.score:5.1f} %, without seeds {100 * step.without_seeds:5.1f} %{done}"
    )

network = grower.finish(quiet=True)
merged = esper.plain(
    network, test.x[:2], merge=True
)  # a GPT2LMHeadModel again: merged.save_pretrained(...) works
with torch.no_grad():
    difference = float(
        (merged.eval()(test.x[:8]).logits - network.eval()(test.x[:8]).logits)
        .abs()
        .max()
    )
same = nn.utils.parameters_to_vector(merged.parameters()).numel() == parameters
print(
    f"{grower.kept}, merged into a {type(merged).__name__} of {'as many' if same else 'more'} parameters: ",
    end="",
)
print(f"logits differ by at most {difference:.0e}")
print(f"test: {100 * right(merged, test).mean():.1f} % of characters")
