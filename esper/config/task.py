"""Settings of training on a task: data, optimizer, number format."""

from __future__ import annotations

from typing import Literal

from esper.config.types import Count, Fraction, NonNegative, Positive, Section

Precision = Literal["auto", "float32", "bfloat16", "float16"]
Optimizer = Literal["sgd", "adamw"]
Freeze = Literal["nothing", "body", "host"]
NEW, TRAINED = "new", "trained"
"""Values of ``TaskConfig.start`` that are not files."""


class TaskConfig(Section):
    name: str = "digits"
    """Task that hosts are trained on; `esper tasks` lists the known ones, path.py:function is a task of your own."""
    data: str | None = None
    """Folder of data that does not ship with Esper; None: the environment variable ESPER_DATA, or ~/.cache/esper."""
    download: bool = False
    """Whether data that is missing from that folder may be downloaded."""
    start: str = NEW
    """Start of hosts: new (new weights); trained (each is first trained alone with the task's own settings, to
    its limit, once for a run's seed); or weights: a run folder, for its best host, a saved host, or a file of weights
    of the task's host, .safetensors or .pt. The episode's schedule begins anew."""
    start_sha256: str | None = None
    """SHA-256 of the file of weights, which a run records, so that it is not resumed from others."""
    freeze: Freeze = "nothing"
    """Part that does not learn: nothing; body, all but the last layer with parameters; or host, all but seeds.
    Statistics of frozen norms stay as they are."""
    batch_size: Count | None = None
    """Samples in one optimizer step of a host; None takes the task's default."""
    samples_per_epoch: Count | None = None
    """Samples that each env draws per epoch; None takes the task's default. An incomplete last batch is dropped."""
    learning_rate: Positive | None = None
    """Learning rate of host and seeds at the start of an episode; None takes the task's default."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Learning rate schedule over the episode: cosine to zero, or constant."""
    warmup_epochs: NonNegative | None = None
    """Epochs, or a fraction of one, over whose steps the learning rate rises linearly from near zero, times the
    schedule; None takes the task's default."""
    seed_rate: Positive = 1.0
    """Learning rate of seeds in units of the host's."""
    seed_warmup_epochs: NonNegative = 0.0
    """Epochs, or a fraction of one, over whose steps the rate of a seed rises linearly from near zero after it has been
    planted."""
    optimizer: Optimizer | None = None
    """Optimizer of hosts and seeds: sgd, or adamw, which suits transformers; None takes the task's default. Their
    learning rates differ by orders of magnitude: set task.learning_rate with it."""
    momentum: Fraction = 0.9
    """SGD momentum of hosts and seeds; with adamw, the decay of the mean gradient, beta 1."""
    beta2: Fraction = 0.999
    """AdamW: decay of the mean squared gradient."""
    weight_decay: NonNegative | None = None
    """Weight decay of hosts; None takes the task's default. Seeds have none, nor with adamw norms and biases."""
    label_smoothing: Fraction | None = None
    """Share of a target that training spreads evenly over all classes; validation does not. None takes the task's
    default."""
    precision: Precision | None = None
    """Number format of forward and backward passes: float32, bfloat16, float16, or auto, which is bfloat16 on devices
    with instructions for it and float32 elsewhere; None takes the task's default. Weights are always float32."""
    micro_batches: Count = 1
    """Number of parts in which a batch is computed, one after another, to save memory; it is still one optimizer step.
    Results differ for BatchNorm, whose statistics are those of a part, and for dropout, which draws once per part.
    """
    exploding_gradient: Positive = 10.0
    """A gradient tensor whose norm exceeds this multiple of max_grad_norm counts as exploding."""
    max_grad_norm: Positive = 1.0
    """Max global L2 norm of gradients; the host and each seed are clipped separately."""

    @property
    def exploding_norm(self) -> float:
        """Norm above which a gradient tensor counts as exploding."""
        return self.exploding_gradient * self.max_grad_norm
