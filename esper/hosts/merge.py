"""Kept seeds become a part of the layers of any network; those that read their sink, of a linear layer's weights."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from esper.core.blend import ChannelScale, Seed
from esper.core.blueprints.adapted import Adapted, is_plain_matrix
from esper.core.ramps import BlendOperator
from esper.hosts import seed_hook
from esper.hosts.widen import (
    NOTHING,
    changed_by,
    is_shared,
    merge_sources,
    replace_rows,
    replace_tensor,
    rows_of,
    seeds_of_model,
)
from esper.ops.torch_state import training_state


def merge_all(
    network: nn.Module,
    difference: Callable[[], str | None],
    stay: Mapping[str, str] = NOTHING,
) -> dict[str, str]:
    """Merges the kept seeds of ``network`` into its layers where they fit.

    ``difference`` says how its outputs differ from those before. ``stay`` has a reason for seeds that are not to be
    merged, by path. Returns the reason for each seed that stays.
    """
    reasons = merge_sources(network, seeds_of_model(network), difference, stay)
    return reasons | merge_seeds(network, difference, stay)


def warn_unmerged(reasons: Mapping[str, str]) -> None:
    """Warns of the seeds that :func:`merge_all` left, by their places, with its reasons."""
    if reasons:
        listed = "; ".join(f"{place}: {reason}" for place, reason in reasons.items())
        warnings.warn(f"these seeds are not merged and stay modules: {listed}", stacklevel=3)


def merge_seeds(
    model: nn.Module,
    difference: Callable[[], str | None],
    stay: Mapping[str, str] = NOTHING,
) -> dict[str, str]:
    """Merges the seeds of ``model`` that read their sink into the weights of their linear layers.

    ``difference`` says how the model's outputs differ from those before; a layer that changes them, because something
    else uses its weights, too, is left as it was.

    Returns the reason for each seed that stays, by path.
    """
    reasons: dict[str, str] = {}
    for path, sink, hook in seed_hook.hooks_of(model):
        if hook.seed is None or hook.frame is not None:
            continue
        layer = last_layer(sink)
        reason = stay.get(path) or obstacle_to_linear(model, hook.seed, layer)
        if reason is None:
            found = changed_by(model, partial(_merge_kept, model, hook, hook.seed, layer), difference)
            reason = found and f"something else uses the weights of its layer or changes its output: merged, {found}"
        if not reason:
            continue
        if path in reasons:
            reason = f"{reasons[path]}, and {reason}"
        reasons[path] = reason
    return reasons


def last_layer(sink: nn.Module) -> nn.Module:
    """Returns the layer that computes the output of a submodule: that of a Sequential is its last one."""
    while type(sink) is nn.Sequential and len(sink):
        sink = sink[-1]
    return sink


def obstacle_to_linear(model: nn.Module, seed: Seed, layer: nn.Module) -> str | None:
    """Returns why the seed cannot become a part of the layer's weights; None if it can.

    It can if it is linear in the output of a linear layer whose weights no other layer uses.
    """
    if isinstance(layer, Adapted) or not is_plain_matrix(layer):
        return f"its output comes from a {type(layer).__name__}, not from a linear layer"
    if not isinstance(layer._parameters.get("weight"), nn.Parameter):
        return "the weights of its layer are computed from others, such as those of weight_norm or of pruning"
    if seed.operator is not BlendOperator.ADD:
        return f"its blend style is not additive ({seed.operator.value})"
    for module in seed.body.modules():
        kind = type(module)
        if kind not in (nn.Linear, ChannelScale, nn.Identity, nn.Sequential):
            return f"{kind.__name__} is not linear"
    if is_shared(model, layer.parameters(recurse=False)):
        return "another layer uses the same weights"
    return None


def _merge_kept(
    model: nn.Module,
    hook: seed_hook.SeedHook,
    seed: Seed,
    layer: nn.Module,
) -> None:
    """Merges the kept ``seed`` of a hook into ``layer`` and removes it."""
    merge_linear(seed, hook.alpha, layer)
    seed_hook.detach(model, hook)


@training_state()
@torch.no_grad()
def merge_linear(seed: Seed, alpha: float, layer: nn.Module) -> None:
    """Merges a seed that is linear in the output of ``layer`` into its weights, in float64.

    With the seed's map d(h) = M h + c, of features h = W x + b, the merged layer has the weights (I + alpha · M) W and
    the bias (I + alpha · M) b + alpha · c.
    """
    rows = rows_of(layer).double().cpu()  # [out, in]
    body = copy.deepcopy(seed.body).to("cpu", torch.float64)
    units = seed.leading or len(rows)
    constant = body(torch.zeros(1, units, dtype=torch.float64))
    matrix = body(torch.eye(units, dtype=torch.float64)) - constant  # row i is the delta of unit i
    others = len(rows) - units
    matrix = functional.pad(matrix, (0, others, 0, others))  # [out, out]
    constant = functional.pad(constant, (0, others))  # [1, out]
    weight = layer.get_parameter("weight")
    replace_rows(layer, rows + alpha * matrix.T @ rows)
    bias = getattr(layer, "bias", None)
    if bias is not None:
        old = bias.double().cpu()
        replace_tensor(layer, "bias", old + alpha * (old @ matrix + constant[0]))
    elif bool(constant.any()):
        layer.bias = nn.Parameter((alpha * constant[0]).to(weight))
