"""Texts that say where a site lies."""

from __future__ import annotations

import pytest

from esper.config import ConfigError
from esper.hosts.site_path import SitePath


@pytest.mark.parametrize(
    ("text", "source", "sink", "ancestor"),
    [
        ("layer1", None, "layer1", "layer1"),
        ("fc1 -> fc2", "fc1", "fc2", ""),
        ("body.0->body.2", "body.0", "body.2", "body"),
        ("h.0.mlp.c_fc -> h.0.mlp.c_proj", "h.0.mlp.c_fc", "h.0.mlp.c_proj", "h.0.mlp"),
        ("qkv -> qkv", "qkv", "qkv", "qkv"),
        ("block -> block.conv", "block", "block.conv", "block"),
    ],
)
def test_a_text_names_one_submodule_or_two(
    text: str, source: str | None, sink: str, ancestor: str
) -> None:
    path = SitePath.parse(text)
    assert (path.source, path.sink, path.ancestor) == (source, sink, ancestor)
    assert SitePath.parse(str(path)) == path
    assert path.paths == ((sink,) if source is None else (source, sink))


@pytest.mark.parametrize(
    "text",
    ["->", "a ->", "-> b", "a -> b -> c", "fc1 > fc2", "fc1 => fc2", "fc1 → fc2"],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="'source -> sink'"):
        SitePath.parse(text)
