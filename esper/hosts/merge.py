"""Seeds that are linear in the output of a linear layer become a part of its weights."""

from __future__ import annotations

import copy
from collections import Counter

import torch
from torch import Tensor, nn

from esper.hosts.grown_module import GrownModule
from esper.lifecycle.ramps import BlendOperator
from esper.seeds.blend import ChannelScale, Seed


def merge_seeds(model: nn.Module) -> dict[str, str]:
    """Replaces grown submodules of ``model`` by their linear layers with the seed merged into the weights.

    With the seed's map d(h) = M h + c, of features h = W x + b, the merged layer has the weights (I + alpha · M) W and
    the bias (I + alpha · M) b + alpha · c, computed in float64. Returns the reason for each one that stays, by path.
    """
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    reasons: dict[str, str] = {}
    for path, grown in [(path, m) for path, m in model.named_modules() if isinstance(m, GrownModule)]:
        seed, layer = grown.get_submodule("seed"), _last(grown.module)
        assert isinstance(seed, Seed)
        if reason := _obstacle(seed, layer, uses):
            reasons[path] = reason
            continue
        _merge(layer, seed, grown.alpha)
        model.set_submodule(path, grown.module)
    return reasons


def _last(module: nn.Module) -> nn.Module:
    """Returns the layer that computes the output of ``module``: of an ``nn.Sequential``, that of its last one."""
    return _last(module[-1]) if type(module) is nn.Sequential and len(module) else module


def _obstacle(seed: Seed, layer: nn.Module, uses: Counter[int]) -> str | None:
    """Returns why the seed cannot become a part of the layer's weights; None if it can.

    It can if it is linear in the output of a linear layer whose weights no other layer uses.
    """
    if type(layer) is not nn.Linear and not _is_transposed(layer):
        return f"its output comes from a {type(layer).__name__}, not from a linear layer"
    if seed.operator is not BlendOperator.ADD:
        return f"its blend style is not additive ({seed.operator.value})"
    linear = (nn.Linear, ChannelScale, nn.Identity, nn.Sequential)
    if other := next((m for m in seed.body.modules() if type(m) not in linear), None):
        return f"{type(other).__name__} is not linear"
    if any(uses[id(p)] > 1 for p in layer.parameters(recurse=False)):
        return "another layer uses the same weights"
    return None


def _is_transposed(layer: nn.Module) -> bool:
    """True for the ``Conv1D`` of Hugging Face's GPT-2: y = x W + b with weights [in, out]."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers.")


@torch.no_grad()
def _merge(layer: nn.Module, seed: Seed, alpha: float) -> None:
    weight, bias = layer.get_parameter("weight"), getattr(layer, "bias", None)
    rows = weight.double().cpu() if _is_transposed(layer) else weight.double().cpu().T  # [in, out]
    body = copy.deepcopy(seed.body).to("cpu", torch.float64)
    channels = rows.shape[1]
    constant = body(torch.zeros(1, channels, dtype=torch.float64))  # [1, out]
    matrix = body(torch.eye(channels, dtype=torch.float64)) - constant  # row i is the delta of unit i
    turned = rows + alpha * rows @ matrix
    weight.copy_(turned if _is_transposed(layer) else turned.T)
    if bias is not None:
        old = bias.double().cpu()
        bias.copy_((old + alpha * (old @ matrix + constant[0])).to(bias.dtype))
    elif bool(constant.any()):
        new: Tensor = alpha * constant[0]
        layer.bias = nn.Parameter(new.to(weight))
