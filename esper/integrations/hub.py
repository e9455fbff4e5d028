"""Policies and grown hosts as models of the Hugging Face hub, by the mixin of ``huggingface_hub``.

``save_pretrained(folder)``, ``push_to_hub(name)`` and ``from_pretrained(folder or name)`` are the mixin's. What is
stored are Esper's own files, which contain no code.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import ModelHubMixin, snapshot_download
from torch import nn

from esper.files.grown_host import HostFiles, export, load_host
from esper.files.policy import find_policy
from esper.hosts.grown import GrownHost

POLICY = "policy.safetensors"
HOST = "host"
TAGS = ["growing-networks"]
DOWNLOAD = ("revision", "cache_dir", "force_download", "local_files_only", "token")
"""Arguments that the mixin passes on to a download."""


def _folder(model_id: str, options: dict[str, Any]) -> Path:
    """Returns the folder ``model_id``, or that of its download from the hub."""
    folder = Path(model_id)
    if folder.is_dir():
        return folder
    passed = {name: options[name] for name in DOWNLOAD if name in options}
    return Path(snapshot_download(model_id, **passed))


class HubPolicy(ModelHubMixin, library_name="esper", tags=TAGS):
    """A policy file, as ``esper eval --save`` writes it. ``str(policy.file)`` names it for ``--controller``.

    Raises ConfigError if ``file`` is not a policy.
    """

    def __init__(self, file: Path | str) -> None:
        self.file = Path(file)
        self.policy = find_policy(str(file))

    def _save_pretrained(self, save_directory: Path) -> None:
        shutil.copyfile(self.file, save_directory / POLICY)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: Any) -> HubPolicy:
        return cls(_folder(model_id, options) / POLICY)


class HubHost(ModelHubMixin, library_name="esper", tags=TAGS):
    """A grown host. ``network`` is an ``nn.Module``, in eval mode after loading."""

    def __init__(self, network: GrownHost) -> None:
        self.network = network

    def _save_pretrained(self, save_directory: Path) -> None:
        export(self.network, save_directory / HOST)

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        model: nn.Module | None = None,
        **options: Any,
    ) -> HubHost:
        """Loads a host; ``model`` is the network that it was grown from, as for :func:`esper.load_host`.

        Raises ConfigError if the files are missing or broken.
        """
        return cls(load_host(HostFiles(_folder(model_id, options) / HOST).stem, model))
