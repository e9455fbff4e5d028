"""Texts that say where a site of a model lies: ``"layer1"``, or ``"fc1 -> fc2"`` with a source of its own."""

from __future__ import annotations

from dataclasses import dataclass

from esper.config import ConfigError

ARROW = "->"


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
        is_other_arrow = ">" in sink or "→" in sink
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
