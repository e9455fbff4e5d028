"""Seeds that are linear in the output of a linear layer become a part of its weights."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import nn

from esper.hosts.seed_hook import SeedHook, drop_container, forget, hooks_of, unregister
from esper.lifecycle.ramps import BlendOperator
from esper.seeds.blend import ChannelScale, Seed
from esper.seeds.blueprints.source import is_transposed


def merge_seeds(
    model: nn.Module,
    difference: Callable[[], str | None],
    stay: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Merges the seeds of ``model`` that read their sink into the weights of their linear layers.

    With the seed's map d(h) = M h + c, of features h = W x + b, the merged layer has the weights (I + alpha · M) W and
    the bias (I + alpha · M) b + alpha · c, computed in float64. ``difference`` says how the model's outputs differ from
    those before; a layer that changes them, because something else uses its weights, too, is left as it was.

    Returns the reason for each seed that stays, by path.
    """
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    reasons: dict[str, str] = {}
    for path, module, hook in hooks_of(model):
        if hook.seed is None or hook.frame is not None:
            continue
        layer = _last(module)
        reason = stay.get(path) or _obstacle(hook.seed, layer, uses)
        reason = reason or _merge_or_undo(model, module, layer, hook, hook.seed, difference)
        if not reason:
            continue
        if path in reasons:
            reason = f"{reasons[path]}, and {reason}"
        reasons[path] = reason
    drop_container(model)
    return reasons


def _merge_or_undo(
    model: nn.Module,
    module: nn.Module,
    layer: nn.Module,
    hook: SeedHook,
    seed: Seed,
    difference: Callable[[], str | None],
) -> str | None:
    """Merges a seed and removes its hook; returns why it was undone, None if the outputs stay the same."""
    before = dict(layer._parameters)
    values = {name: p.detach().clone() for name, p in before.items() if p is not None}
    hooks = dict(module._forward_hooks)
    _merge(layer, seed, hook.alpha)
    unregister(model, hook)
    change = difference()
    if change is None:
        forget(model, seed)
        return None
    module._forward_hooks.clear()  # their order counts
    module._forward_hooks.update(hooks)
    layer._parameters.update(before)
    for name, value in values.items():
        layer.get_parameter(name).data.copy_(value)
    return f"something else uses the weights of its layer or changes its output: merged, {change}"


def _last(module: nn.Module) -> nn.Module:
    """Returns the layer that computes the output of ``module``: of an ``nn.Sequential``, that of its last one."""
    while type(module) is nn.Sequential and len(module):
        module = module[-1]
    return module


def _obstacle(seed: Seed, layer: nn.Module, uses: Counter[int]) -> str | None:
    """Returns why the seed cannot become a part of the layer's weights; None if it can.

    It can if it is linear in the output of a linear layer whose weights no other layer uses.
    """
    if type(layer) is not nn.Linear and not is_transposed(layer):
        return f"its output comes from a {type(layer).__name__}, not from a linear layer"
    if not isinstance(layer._parameters.get("weight"), nn.Parameter):
        return "the weights of its layer are computed from others, such as those of weight_norm or of pruning"
    if seed.operator is not BlendOperator.ADD:
        return f"its blend style is not additive ({seed.operator.value})"
    for module in seed.body.modules():
        kind = type(module)
        if kind not in (nn.Linear, ChannelScale, nn.Identity, nn.Sequential):
            return f"{kind.__name__} is not linear"
    if any(uses[id(p)] > 1 for p in layer.parameters(recurse=False)):
        return "another layer uses the same weights"
    return None


@torch.no_grad()
def _merge(layer: nn.Module, seed: Seed, alpha: float) -> None:
    weight = layer.get_parameter("weight")
    bias = getattr(layer, "bias", None)
    rows = weight.double().cpu()
    if not is_transposed(layer):
        rows = rows.T  # [in, out]
    body = copy.deepcopy(seed.body).to("cpu", torch.float64)
    channels = rows.shape[1]
    constant = body(torch.zeros(1, channels, dtype=torch.float64))  # [1, out]
    matrix = body(torch.eye(channels, dtype=torch.float64)) - constant  # row i is the delta of unit i
    merged = rows + alpha * rows @ matrix
    if not is_transposed(layer):
        merged = merged.T
    weight.copy_(merged)
    if bias is not None:
        old = bias.double().cpu()
        new = old + alpha * (old @ matrix + constant[0])
        bias.copy_(new.to(bias.dtype))
    elif bool(constant.any()):
        new = alpha * constant[0]
        layer.bias = nn.Parameter(new.to(weight))
