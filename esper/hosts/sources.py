"""Sources of sites in any model: the input of one submodule, kept until the pass reaches another one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.config import ConfigError
from esper.hosts.outputs import source_of
from esper.hosts.site_path import SitePath


class Reader(Protocol):
    """Whoever reads a source."""

    @property
    def reads(self) -> bool:
        """Whether the source of the present pass is needed."""


class SourceFrame:
    """The sources that one site has in the passes that are running.

    Each run of the innermost submodule with both source and sink has a place of its own, which is given up when it
    ends, also by an error. So nested runs, runs in several threads, and a run that is repeated for its gradients never
    see the source of another one. Copies and pickles have none.

    Args:
        path: where the site lies.
        reader: decides in each pass whether its source is kept; None: it always is.
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

    def open(self) -> None:
        self._runs.append(None)

    def close(self) -> None:
        self._runs.pop()

    def keep(self, source: Tensor) -> None:
        """Keeps the source of the innermost run until :meth:`take`. Raises ConfigError if it has one already."""
        runs = self._runs
        if not runs:
            return  # a part of the model runs by itself; the sink says so if it is reached, too
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


class FrameHook:
    """A hook that belongs to a frame."""

    def __init__(self, frame: SourceFrame) -> None:
        self.frame = frame


class Opening(FrameHook):
    def __call__(self, _module: nn.Module, _inputs: tuple[Any, ...]) -> None:
        self.frame.open()


class Keeping(FrameHook):
    def __call__(
        self,
        _module: nn.Module,
        inputs: tuple[Any, ...],
        named: dict[str, Any],
    ) -> None:
        if self.frame.reader is None or self.frame.reader.reads:
            self.frame.keep(source_of(inputs, named))


class Closing(FrameHook):
    def __call__(
        self,
        _module: nn.Module,
        _inputs: tuple[Any, ...],
        _output: object,
    ) -> None:
        self.frame.close()


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
        (around, around.register_forward_pre_hook(Opening(frame))),
        (source, source.register_forward_pre_hook(Keeping(frame), with_kwargs=True)),
        (sink, sink.register_forward_hook(at_sink)),
        (around, around.register_forward_hook(Closing(frame), always_call=True)),
    ]
