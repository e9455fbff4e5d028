"""Layers that LoRA and AdaLoRA adapt. How they learn is tested in tests/integrations/test_adapters.py."""

from __future__ import annotations

import importlib.util

import pytest
from torch import nn

from esper.config import ConfigError
from esper.data.tasks import load_task
from esper.hosts.adapted import import_peft, layers_to_adapt, size_of_rank
from esper.hosts.graft import graft
from esper.hosts.host import layers_of
from esper.hosts.transformer import TransformerHost


def test_without_peft_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "peft" else find(name)
    )
    with pytest.raises(ConfigError, match=r'not installed: pip install "peft>=0.18"'):
        import_peft()


def test_linear_layers_before_the_last_layer_are_adapted() -> None:
    model = nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)
    )
    host = graft(model, ["1"], "mlp")
    names, head = layers_to_adapt(host)
    assert [dict(host.named_modules())[name] for name in names] == [model[0], model[2]]
    assert head is model[4]
    assert size_of_rank(host) == (4 + 6) + (6 + 5)


def test_a_transformer_has_four_in_a_block() -> None:
    host = TransformerHost(vocabulary=11, width=8, layers=2, heads=2, block=6, slots=2)
    assert len(layers_to_adapt(host)[0]) == 2 * 4
    assert size_of_rank(host) == 2 * ((8 + 24) + (8 + 8) + (8 + 32) + (32 + 8))


def test_the_layers_of_a_network_have_parameters_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.ReLU(), nn.BatchNorm1d(6)))
    assert list(layers_of(model)) == ["0", "1.1"]


def test_a_host_without_linear_layers_cannot_be_adapted() -> None:
    with pytest.raises(ConfigError, match="this host has none before its last layer"):
        layers_to_adapt(load_task("digits").build_host())
