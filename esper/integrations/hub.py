"""Refuses the classes of an earlier version for the Hugging Face hub."""

from __future__ import annotations

from esper.config import ConfigError

INSTEAD = {
    "HubPolicy": "push the policy file of `esper eval --save` with huggingface_hub.upload_file",
    "HubHost": "push the folder of esper.export() with huggingface_hub.upload_folder",
}


def __getattr__(name: str) -> object:
    if name not in INSTEAD:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise ConfigError(f"{name} was removed: {INSTEAD[name]}, and download it with huggingface_hub.snapshot_download")
