"""Paths of sites, and sources that are kept until the sink runs."""

from __future__ import annotations

import copy
import pickle
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.config import ConfigError
from esper.core.place import Features
from esper.hosts.sources import SitePath, SourceFrame, hook_site


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


@pytest.mark.parametrize("name", ["convs.<a___to___b>", "a>b", "blocks.x>", "items.<b"])
def test_names_of_submodules_may_have_angles(name: str) -> None:
    assert SitePath.parse(name) == SitePath(name)
    assert SitePath.parse(f"{name} -> {name}") == SitePath(name, name)


PATH = SitePath("last", "first")
X = torch.randn(3, 4)


ANY = nn.Identity()


def frame(reads: bool = True) -> SourceFrame:
    return SourceFrame(PATH, SimpleNamespace(reads=reads))


def test_a_source_is_taken_once_in_the_run_in_which_it_was_kept() -> None:
    kept = frame()
    kept.open(ANY, ())
    kept.keep(ANY, (X,), {})
    found = kept.take()
    assert torch.equal(found, X)
    assert found.data_ptr() != X.data_ptr(), "a layer may work in place"
    with pytest.raises(
        ConfigError,
        match="first has not run before last in this pass; name the layer that runs first",
    ):
        kept.take()


def test_the_source_of_one_module_is_its_input_itself() -> None:
    kept = SourceFrame(SitePath("qkv", "qkv"))
    kept.open(ANY, ())
    kept.keep(ANY, (X,), {})
    assert kept.take() is X


def test_nested_runs_have_sources_of_their_own() -> None:
    kept = frame()
    kept.open(ANY, ())
    kept.keep(ANY, (X,), {})
    kept.open(ANY, ())
    with pytest.raises(ConfigError, match="has not run"):
        kept.take()
    kept.keep(ANY, (X + 1,), {})
    assert torch.equal(kept.take(), X + 1)
    kept.close(ANY, (), None)
    assert torch.equal(kept.take(), X)


def test_a_source_that_runs_twice_before_its_sink_is_refused() -> None:
    kept = frame()
    kept.open(ANY, ())
    kept.keep(ANY, (X,), {})
    with pytest.raises(ConfigError, match="first runs more than once before last"):
        kept.keep(ANY, (X,), {})


def test_threads_have_runs_of_their_own() -> None:
    kept = frame()
    kept.open(ANY, ())
    kept.keep(ANY, (X,), {})
    errors: list[Exception] = []

    def elsewhere() -> None:
        try:
            kept.take()
        except ConfigError as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert torch.equal(kept.take(), X)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]
)
def test_copies_have_no_run(copied: Any) -> None:
    kept = frame()
    kept.open(ANY, ())
    kept.keep(ANY, (X,), {})
    other = copied(kept)
    assert (other.path, other.reader.reads) == (PATH, True)
    with pytest.raises(ConfigError):
        other.take()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("reads", [True, False])
def test_hooks_keep_what_is_read_and_leave_nothing_when_a_pass_fails(
    reads: bool,
) -> None:
    model, kept, seen = Net(), frame(reads), list[Tensor]()

    def at_sink(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        if reads:
            seen.append(kept.take())

    hooks = hook_site(model, PATH, at_sink, kept)
    model(X)
    with pytest.raises(RuntimeError):
        model(X[:, :3])
    assert [len(values) for values in seen] == ([3] if reads else [])
    assert kept._runs == []
    for module, handle in hooks:
        assert module in (model, model.first, model.last)
        handle.remove()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


class Listed(nn.Module):
    """Layers in a list, which runs them itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def test_a_source_and_a_sink_may_lie_in_a_list_of_modules() -> None:
    host = esper.graft(Listed(), ["layers.0 -> layers.1"], example=torch.randn(3, 4))
    x = torch.randn(3, 4)
    read: list[Tensor] = []

    def hook(_site: int, at: Features) -> Tensor:
        read.append(at.source)
        return at.h

    host.forward_with_hook(x, hook)
    assert torch.equal(read[0], x)
