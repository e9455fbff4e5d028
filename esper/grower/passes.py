"""The forward passes of a loop's model: where they begin and end, and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.config import ConfigError
from esper.hosts.example import is_transformed, samples_in, tensors_in

RESIZED = (
    "layers of the saved model had other sizes: make a new Grower and call grower.load_state_dict() first, which gives "
    "them to this model, then load the model and the optimizer"
)
"""Is said before torch's own words about sizes."""


class PassHook:
    """Hooks of the whole model that note where a forward pass begins and ends, and its inputs.

    In copies and pickles of the model they do nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self.before_first: Callable[[], None] | None = None
        """Called once, before the next pass."""
        self.before_pass: Callable[[], None] = lambda: None
        """Called before each pass."""
        self.before_training: Callable[[], None] = lambda: None
        """Called before each pass in training mode that is not a shadow's."""
        self.after_pass: Callable[[], None] = lambda: None
        """Called after each pass."""
        self.shadow = False
        """Whether the present passes are those of a shadow."""
        self.last: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        """Positional and named arguments of the last pass in training mode, or of the first pass."""
        self.samples: int | None = None
        """First dimension of the inputs of the present pass; None without inputs."""
        self.compiled = False
        """Whether a pass was part of a compiled function, which does not notice that hooks come and go."""
        self.transformed: set[str] = set()
        """Slots whose site has run within a transform of ``torch.func``."""
        self._copied = False
        self._inside = False
        self._reached: set[str] = set()
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self.enter, with_kwargs=True),
            model.register_forward_hook(self.leave, always_call=True),
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {"_copied": True}

    def enter(
        self,
        model: nn.Module,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> None:
        if self._copied or is_transformed() or is_traced():
            return
        self._begin()
        self._reached.clear()
        self._inside = True
        if torch.compiler.is_compiling():
            self.compiled = True
        if len(arguments) == 1 and isinstance(arguments[0], Tensor) and arguments[0].dim():
            self.samples = len(arguments[0])  # a loop has no time to lose
        else:
            self.samples = samples_in(tensors_in((arguments, keywords)))
        if self.samples != 0 and (model.training or self.last is None):
            self.last = arguments, keywords
        if model.training and not self.shadow:
            self.before_training()

    def _begin(self) -> None:
        if self.before_first is not None:
            self.before_first()
            self.before_first = None
        self.before_pass()

    def at_site(self, training: bool) -> None:
        """Begins a pass at a site that runs outside of one, because the loop calls methods or parts of the model."""
        if self._inside:
            return
        self._begin()
        if training and self.last is None and not self.shadow:
            self.before_training()

    @property
    def inputs(self) -> int:
        """Number of values in the inputs of a sample of the last training pass; 0 before it, or without inputs."""
        tensors = list(tensors_in(self.last))
        samples = samples_in(tensors)
        return sum(tensor.numel() for tensor in tensors if tensor.dim()) // samples if samples else 0

    def watch_loading(self, watched: Any, loaded: Callable[[], None]) -> None:
        """Calls ``loaded`` after each ``load_state_dict`` of the module ``watched`` or of what holds it."""
        self._loaded = loaded
        self._handles.append(watched.register_load_state_dict_pre_hook(self._before_loading))
        self._handles.append(watched.register_load_state_dict_post_hook(self._after_loading))

    def _before_loading(self, *arguments: Any) -> None:
        if not self._copied:
            self._errors: list[str] = arguments[-1]  # torch raises what is in it after the load

    def _after_loading(self, _module: nn.Module, _keys: object) -> None:
        if self._copied:
            return
        if RESIZED not in self._errors and any("size mismatch" in error for error in self._errors):
            self._errors.insert(0, RESIZED)
        self._loaded()

    def leave(self, _model: nn.Module, _arguments: object, _output: object) -> None:
        if self._copied or is_transformed() or is_traced():
            return
        self._inside = False
        self.after_pass()

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


def is_traced() -> bool:
    """Whether the present pass is traced or exported: its tensors have no numbers, or sizes that are tensors."""
    tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return tracing or torch.compiler.is_exporting()


def require_untraced(name: str) -> None:
    """Raises ConfigError if the present pass is traced: it would hold the seed as it is now, as constants."""
    if is_traced():
        raise ConfigError(
            f"the model is traced or exported while the seed in slot {name} grows: take copy.deepcopy(model), of which "
            "seeds that are on are a part, or what grower.finish() returns"
        )


def first_parameter_of(model: nn.Module) -> tuple[nn.Module, str] | None:
    """Returns the module and the name in it of the first floating-point parameter of ``model``; None without one."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_floating_point():
                return module, name
    return None
