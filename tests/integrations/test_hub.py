"""Policies and hosts go through the mixin of huggingface_hub and come back the same; by a folder, without a network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from esper.config import ConfigError
from esper.data.tasks import load_task
from esper.files.policy import PRETRAINED
from esper.hosts.grown import GrownHost

pytest.importorskip("huggingface_hub")
from esper.integrations.hub import POLICY, HubHost, HubPolicy


def test_a_policy_comes_back_unchanged(tmp_path: Path) -> None:
    HubPolicy(PRETRAINED).save_pretrained(tmp_path)
    found = HubPolicy.from_pretrained(tmp_path)
    assert found.file == tmp_path / POLICY
    assert found.file.read_bytes() == PRETRAINED.read_bytes()
    assert found.policy.facts is not None


def test_a_host_comes_back_with_the_same_outputs(tmp_path: Path) -> None:
    task = load_task("digits")
    host = task.build_host()
    host.probe(task.sample)
    network = GrownHost(host, {}, {}, task.name).eval()
    HubHost(network).save_pretrained(tmp_path)
    found = HubHost.from_pretrained(tmp_path).network
    assert not found.training
    images = task.test.x[:8]
    with torch.inference_mode():
        assert torch.equal(found(images), network(images))


def test_a_folder_without_a_policy_or_a_host_says_what_is_missing(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"no policy at .*policy\.safetensors"):
        HubPolicy.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"host\.json does not exist"):
        HubHost.from_pretrained(tmp_path)
