"""How a seed's output f(h) becomes the delta d that is added to the host's features: out = h + alpha · d."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

import torch
from torch import Tensor, nn

from esper.seeds.alpha import AlphaCurve


class BlendOperator(Enum):
    ADD = "add"
    """d = f(h)"""
    MULTIPLY = "multiply"
    """d = h · tanh(f(h))"""
    GATE = "gate"
    """d = g(h) · f(h), with g in (0, 1) per sample, and per position in a sequence"""


@dataclass(frozen=True)
class BlendStyle:
    """What the controller chooses at germination: an operator and the curve of the first ramp."""

    operator: BlendOperator
    curve: AlphaCurve


STYLES: Mapping[str, BlendStyle] = MappingProxyType(
    {
        "LINEAR_ADD": BlendStyle(BlendOperator.ADD, AlphaCurve.LINEAR),
        "LINEAR_MULTIPLY": BlendStyle(BlendOperator.MULTIPLY, AlphaCurve.LINEAR),
        "SIGMOID_ADD": BlendStyle(BlendOperator.ADD, AlphaCurve.LOGISTIC_12),
        "GATED_GATE": BlendStyle(BlendOperator.GATE, AlphaCurve.LINEAR),
    }
)


def blend(h: Tensor, delta: Tensor, alpha: Tensor) -> Tensor:
    """h + alpha · delta in the shape and dtype of features ``h``, with alpha a scalar on the device, which a captured
    step reads anew."""
    return torch.addcmul(h, delta.to(h.dtype), alpha.to(h.dtype))


def gate_parameters(channels: int) -> int:
    """Parameters of the per-sample gate: Linear(C, H) and Linear(H, 1) with H = max(8, C/4)."""
    hidden = max(8, channels // 4)
    return (channels + 1) * hidden + hidden + 1


def running_mean(h: Tensor) -> Tensor:
    """What the gate may know of features with channels last: [B, D] as they are; of [B, T, D] at position t the mean
    over positions 1 to t, so that no position sees a later one.

    Positions that lie on more than one axis, [B, ..., D], count in row-major order. The shape and dtype of ``h``.
    """
    if h.dim() == 2:
        return h
    positions = h.flatten(1, -2)
    precise = torch.promote_types(h.dtype, torch.float32)  # bfloat16 has eight bits for a sum or a count
    count = torch.arange(1, positions.shape[1] + 1, dtype=precise, device=h.device)
    mean = positions.cumsum(dim=1, dtype=precise) / count[:, None]
    return mean.to(h.dtype).reshape(h.shape)


class Seed(nn.Module):
    """A blueprint's body with its blend operator: features ``h`` to a delta ``d`` of the same shape.

    All parameters, the gate's included, exist from birth, so that the one optimizer made then holds every one of them.

    Args:
        body: the blueprint's module.
        operator: what makes the delta of the body's output.
        channels: channels of ``h``, C.
        topology: how ``h`` is laid out. "cnn": [B, C, H, W]. Any other, such as "transformer" [B, T, C] and "mlp"
            [B, C], has the channels last.
    """

    def __init__(self, body: nn.Module, operator: BlendOperator, channels: int, topology: str) -> None:
        super().__init__()
        self.body = body
        self.operator = operator
        self.images = topology == "cnn"
        self.gate: nn.Module | None = None
        if operator is BlendOperator.GATE:
            hidden = max(8, channels // 4)
            # SiLU, not ReLU: eight hidden units can all be born dead, and then the gate never learns.
            self.gate = nn.Sequential(nn.Linear(channels, hidden), nn.SiLU(), nn.Linear(hidden, 1), nn.Sigmoid())

    def forward(self, h: Tensor) -> Tensor:
        precise = torch.promote_types(h.dtype, torch.float32)
        # Of a network in half precision; parameters have no less than 32 bits. Autocast sees to that by itself.
        if h.dtype != precise and not torch.is_autocast_enabled(h.device.type):
            return self(h.to(precise)).to(h.dtype)  # type: ignore[no-any-return]
        f: Tensor = self.body(h)
        if self.operator is BlendOperator.MULTIPLY:
            return h * torch.tanh(f)
        if self.gate is None:
            return f
        if self.images:
            g: Tensor = self.gate(h.mean(dim=(2, 3)))  # [B, 1]
            return g[:, :, None, None] * f
        return self.gate(running_mean(h)) * f  # type: ignore[no-any-return]  # [B, 1] or [B, T, 1]
