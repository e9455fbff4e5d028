"""The forward passes of a model in a loop of one's own: where one begins and ends, and with which inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.hosts.compare import tensors_in


class PassHook:
    """Hooks of the whole model. Copies and pickles of the model contain them without effect."""

    def __init__(self, model: nn.Module) -> None:
        self.before_first: Callable[[], None] | None = None
        """Done once, before the next pass."""
        self.before_training: Callable[[], None] = lambda: None
        """Done before each pass in training mode that is not a shadow's."""
        self.shadow = False
        """Whether the present passes are those of a shadow."""
        self.last: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        """Positional and named arguments of the last pass in training mode, or of the first pass."""
        self.samples: int | None = None
        """First dimension of the inputs of the present pass; None if they have none."""
        self._inside = False
        self._reached: set[str] = set()
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(_Enter(self), with_kwargs=True),
            model.register_forward_hook(_Leave(self), always_call=True),
        ]

    def enter(
        self,
        model: nn.Module,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> None:
        """Notes that a pass begins, with these inputs."""
        if self.before_first is not None:
            self.before_first()
            self.before_first = None
        self._reached.clear()
        self._inside = True
        self.samples = None
        for tensor in tensors_in((arguments, keywords)):
            if tensor.dim():
                self.samples = len(tensor)
                break
        if model.training or self.last is None:
            self.last = arguments, keywords
        if model.training and not self.shadow:
            self.before_training()

    def leave(self) -> None:
        self._inside = False

    def reach(self, name: str) -> bool:
        """Notes that the site ``name`` runs; returns whether it runs for the first time in this pass.

        Activation checkpointing runs it again outside of a pass, in the backward pass; that is no later time.
        """
        first = name not in self._reached
        self._reached.add(name)
        return first or not self._inside

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.last = None


class _Bound:
    """A hook that forgets its pass in copies and pickles."""

    def __init__(self, passes: PassHook) -> None:
        self.passes: PassHook | None = passes

    def __getstate__(self) -> dict[str, Any]:
        return {"passes": None}


class _Enter(_Bound):
    def __call__(
        self,
        model: nn.Module,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> None:
        if self.passes is not None:
            self.passes.enter(model, arguments, keywords)


class _Leave(_Bound):
    def __call__(
        self,
        _model: nn.Module,
        _arguments: tuple[Any, ...],
        _output: Tensor,
    ) -> None:
        if self.passes is not None:
            self.passes.leave()
