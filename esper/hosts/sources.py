"""Sites of any network: the submodules between which a seed reads and adds, and the hooks that keep its source."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.config import ConfigError
from esper.hosts.inputs import source_of

ARROW = "->"
OTHER_ARROW = re.compile(r"(^|\s|[=~-])>|→")
"""A text that looks like an arrow. Names of submodules may have ">" in them, as in torch_geometric's HeteroConv."""


@dataclass(frozen=True)
class SitePath:
    """The submodules between which a site lies, by their paths in the model."""

    sink: str
    """The submodule to whose output a seed adds."""
    source: str | None = None
    """The submodule whose input a seed reads; None: it reads the sink."""

    @classmethod
    def parse(cls, text: str) -> SitePath:
        """Reads ``"sink"``, "" for the model itself, or ``"source -> sink"``. Raises ConfigError for another form."""
        *sources, sink = map(str.strip, text.split(ARROW))
        is_other_arrow = OTHER_ARROW.search(sink) is not None
        if not sources and not is_other_arrow:
            return cls(sink)
        if len(sources) != 1 or not sources[0] or not sink or is_other_arrow:
            raise ConfigError(f"a site is a submodule, or 'source {ARROW} sink' with two of them, not {text!r}")
        return cls(sink, sources[0])

    @property
    def ancestor(self) -> str:
        """Path of the innermost submodule that has both, "" for the model itself."""
        if self.source is None:
            return self.sink
        common = []
        for one, other in zip(self.source.split("."), self.sink.split("."), strict=False):
            if one != other:
                break
            common.append(one)
        return ".".join(common)

    @property
    def paths(self) -> tuple[str, ...]:
        """Both submodules, or the one of a site that reads its sink."""
        if self.source is None:
            return (self.sink,)
        return self.source, self.sink

    def __str__(self) -> str:
        if self.source is None:
            return self.sink
        return f"{self.source} {ARROW} {self.sink}"


class Reader(Protocol):
    """A hook at a sink."""

    @property
    def reads(self) -> bool:
        """Whether it needs the source of the present pass."""


class SourceFrame:
    """Forward hooks that keep the source of one site until its sink runs.

    Each run of the innermost submodule with both source and sink has a place for its source, which it gives up when it
    ends, also by an error. So nested runs, runs in several threads, and a run that is repeated for its gradients never
    see the source of another run. Copies and pickles of a frame are empty.

    Args:
        path: where the site lies.
        reader: its ``reads`` says in each pass whether the source is kept; None: it always is.
    """

    def __init__(self, path: SitePath, reader: Reader | None = None) -> None:
        self.path = path
        self.reader = reader
        self._local = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "reader": self.reader}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def _runs(self) -> list[Tensor | None]:
        """The source of each run in this thread, the innermost run last; None where it is not known."""
        if not hasattr(self._local, "runs"):
            self._local.runs = []
        return self._local.runs  # type: ignore[no-any-return]

    def open(self, _module: nn.Module, _inputs: object) -> None:
        """Hook before the submodule around both."""
        self._runs.append(None)

    def close(self, _module: nn.Module, _inputs: object, _output: object) -> None:
        """Hook after the submodule around both."""
        self._runs.pop()

    def keep(self, _module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Hook before the source. Raises ConfigError if the present run has a source already."""
        runs = self._runs
        # Without a run, a part of the model runs by itself; the sink says so if it is reached, too.
        if not runs or (self.reader is not None and not self.reader.reads):
            return
        source = source_of(inputs, named)
        if runs[-1] is not None:
            raise ConfigError(f"{self.path}: {self.path.source} runs more than once before {self.path.sink}")
        # Layers may overwrite it before the seed reads it, but not between the call of one layer and its output.
        if self.path.source != self.path.sink:
            source = source.clone()
        runs[-1] = source

    def take(self) -> Tensor:
        """Returns the source of the innermost run, for the last time. Raises ConfigError if it has none."""
        runs = self._runs
        if not runs or runs[-1] is None:
            raise ConfigError(
                f"{self.path}: {self.path.source} has not run before {self.path.sink} in this pass; name the layer "
                "that runs first before the arrow, call the model itself, and checkpoint activations of both or of "
                "neither"
            )
        source = runs[-1]
        runs[-1] = None
        return source


def _around(model: nn.Module, path: SitePath) -> nn.Module:
    """Returns the innermost submodule that runs with both source and sink in it: a list of modules does not run."""
    inner = path.ancestor
    while True:
        module = model.get_submodule(inner)
        runs = getattr(type(module).forward, "__name__", "") != "_forward_unimplemented"
        if runs or not inner:
            return module
        inner, _, _ = inner.rpartition(".")


def hook_site(
    model: nn.Module,
    path: SitePath,
    at_sink: Callable[..., Any],
    frame: SourceFrame | None,
) -> list[tuple[nn.Module, RemovableHandle]]:
    """Registers ``at_sink`` as a forward hook of the sink at ``path``, and hooks that keep its source in ``frame``.

    Returns all of them with their submodules.
    """
    sink = model.get_submodule(path.sink)
    if frame is None or path.source is None:
        return [(sink, sink.register_forward_hook(at_sink))]
    source = model.get_submodule(path.source)
    around = _around(model, path)
    return [
        (around, around.register_forward_pre_hook(frame.open)),
        (source, source.register_forward_pre_hook(frame.keep, with_kwargs=True)),
        (sink, sink.register_forward_hook(at_sink)),
        (around, around.register_forward_hook(frame.close, always_call=True)),
    ]
