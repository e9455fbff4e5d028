"""The tasks of the questions in benchmarks/questions.md: `--task benchmarks/question_tasks.py:fashion_small`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from esper.data.split import Split
from esper.data.task import Augmentation, Task
from esper.data.tasks import load_task
from esper.data.text import (
    LENGTH,
    character_task,
    chars_parts,
    code_parts,
    vocabulary,
)
from esper.hosts.cnn import CNNHost
from esper.hosts.graft import GraftedHost, graft
from esper.hosts.transformer import CausalAttention, TransformerHost

LATE_SHARE = 1 / 3
"""Share of the training data that arrives after the first training."""
FEW = 100
"""Number of training images of a task that a host is adapted to."""
FEW_SEQUENCES = 200
"""The same of a text: 12,800 characters."""


def small(task: Task) -> Task:
    """Returns an image task with a host that reaches its limit soon: three blocks of 3, 6 and 12 channels."""
    return replace(
        task,
        build_host=partial(CNNHost, 1, 10, base=3, blocks=3),
        slots=("all",),
        at_once=True,
    )


def fashion_small() -> Task:
    """Fashion-MNIST with a host of 1,009 parameters, in short epochs, with 1,000 images for validation."""
    task = small(load_task("fashion_mnist"))
    validation = Split(
        task.validation.x[:1_000], task.validation.y[:1_000], task.validation.table
    )
    changes = {
        "optimizer": "adamw",
        "learning_rate": 0.05,
        "weight_decay": 0.0,
        "augmentation": Augmentation(),
        "warmup_epochs": 8.0,
    }
    sizes = {"samples_per_epoch": 1_000, "episode_length": 80}
    return replace(
        task, name="fashion_small", validation=validation, **sizes, **changes
    )


def digits_short() -> Task:
    """Digits in epochs of half of the images, so that growth is decided twice as often."""
    task = load_task("digits")
    return replace(
        task,
        name="digits_short",
        samples_per_epoch=498,
        episode_length=60,
        warmup_epochs=6.0,
    )


def late(task: Task) -> Task:
    """Returns a task of whose training data a part arrives late: hosts are trained on the first part before."""
    assert isinstance(task.train, Split)
    first = round(task.samples * (1 - LATE_SHARE))
    part = Split(task.train.x[:first], task.train.y[:first], task.train.table)
    fewer = min(first, task.samples_per_epoch or first)
    before = replace(
        task, name=f"{task.name}_before", train=part, samples_per_epoch=fewer
    )
    return replace(task, name=f"{task.name}_late", earlier=before)


def digits_late() -> Task:
    """Digits, a third of which arrives after the first training."""
    return late(digits_short())


def fashion_late() -> Task:
    """Fashion-MNIST with few images, a third of which arrives after the first training of a small host."""
    task = fashion_small()
    assert isinstance(task.train, Split)
    few = Split(task.train.x[:3_000], task.train.y[:3_000], task.train.table)
    return late(replace(task, train=few, name="fashion_few"))


def fashion_to_mnist() -> Task:
    """A few images of MNIST, for small hosts that were trained on Fashion-MNIST."""
    task = small(load_task("mnist5k"))
    assert isinstance(task.train, Split)
    few = Split(task.train.x[:FEW], task.train.y[:FEW], task.train.table)
    sizes = {
        "samples_per_epoch": FEW,
        "batch_size": FEW // 2,
        "augmentation": Augmentation(),
    }
    return replace(
        task, name="fashion_to_mnist", train=few, earlier=fashion_small(), **sizes
    )


def text_pair() -> tuple[Task, Task]:
    """Returns English and Python as tasks with the same tokens, for small transformers."""
    texts = {"chars": chars_parts(), "code": code_parts()}
    tokens = vocabulary("".join(parts[0] for parts in texts.values()))
    made = [
        replace(
            character_task(f"{name}_small", "", parts, tokens),
            build_host=partial(
                TransformerHost,
                len(tokens) + 1,
                width=32,
                layers=2,
                heads=4,
                block=LENGTH,
                slots=2,
            ),
            slots=("all",),
            at_once=True,
        )
        for name, parts in texts.items()
    ]
    return made[0], made[1]


def adapted_text(before: Task, task: Task, name: str) -> Task:
    """Returns a text task of which few sequences are there, for hosts that were trained on another."""
    assert isinstance(task.train, Split)
    assert isinstance(task.test, Split)
    few = task.train.evenly_spaced(FEW_SEQUENCES)
    tested = task.test.evenly_spaced(1_000)
    sizes = {"samples_per_epoch": FEW_SEQUENCES, "warmup_epochs": 0.0}
    return replace(
        task,
        name=name,
        train=few,
        test=tested,
        earlier=replace(before, batch_size=32),
        **sizes,
    )


def chars_to_code() -> Task:
    """A few lines of Python, for small transformers that were trained on English."""
    english, python = text_pair()
    return adapted_text(english, python, "chars_to_code")


class PlainAttention(nn.Module):
    """The attention of a block as an ordinary module, whose layers are seen one by one."""

    def __init__(self, attention: CausalAttention) -> None:
        super().__init__()
        self.query_key_value = attention.query_key_value
        self.project = attention.project
        self.heads = attention.heads

    def forward(self, h: Tensor) -> Tensor:
        batch, length, width = h.shape
        parts = self.query_key_value(h).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


def with_loras(build: Callable[[], TransformerHost]) -> GraftedHost:
    """Makes a network with a slot at each linear layer, whose LoRA changes the weights there."""
    model = build()
    for block in model.blocks:
        block.attention = PlainAttention(block.attention)  # type: ignore[assignment]
    linear = [
        name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)
    ]
    sites = {f"r3c{number}": f"{name} -> {name}" for number, name in enumerate(linear)}
    return graft(model, sites, topology="transformer")


def chars_to_code_loras() -> Task:
    """The same, with LoRAs in all linear layers."""
    task = chars_to_code()
    assert task.earlier is not None
    build = partial(with_loras, task.build_host)
    earlier = replace(task.earlier, build_host=build, slots=("all",))
    return replace(task, name="chars_to_code_loras", build_host=build, earlier=earlier)


def code_to_chars() -> Task:
    """A few lines of English, for small transformers that were trained on Python."""
    english, python = text_pair()
    return adapted_text(python, english, "code_to_chars")
