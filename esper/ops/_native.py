"""Loads the compiled modules and reports which are loaded or missing, and how to repair them.

The CPU module (``esper._C``) is required: without it, importing raises ``ImportError``. The CUDA module
(``esper._C_cuda``) is optional: a CPU build of torch cannot load it.

``ESPER_REQUIRE_NATIVE=1`` disables fallbacks, so that no measurement is taken on one by accident: a GPU without the
CUDA module raises ``ImportError``, and all code with a fallback calls :func:`refuse_fallback` before using it.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

VARIABLE = "ESPER_REQUIRE_NATIVE"
REPAIR_COMMAND = "pip install --force-reinstall --no-deps -e ."
_PACKAGE = Path(__file__).resolve().parent.parent
_RECORD = _PACKAGE / "_build_info.json"


@dataclass(frozen=True)
class ModuleReport:
    """A compiled module: its name, and either the file it was loaded from or the reason why it is missing."""

    name: str
    path: Path | None
    reason: str | None

    @property
    def loaded(self) -> bool:
        """True if the module is loaded and can be used."""
        return self.path is not None


def build_info() -> dict[str, Any]:
    """Returns the record of the build of the installed modules; empty if the record is missing.

    Keys: ``torch``, ``torch_target``, ``python``, ``platform``, ``cxx_flags`` and ``cuda`` (``built``, ``reason``,
    ``torch_cuda``, ``architectures``).
    """
    if not _RECORD.is_file():
        return {}
    return cast(dict[str, Any], json.loads(_RECORD.read_text()))


def _file_of(name: str) -> Path | None:
    """The built file of a module in this package; the import system could find another checkout's."""
    stem = name.removeprefix("esper.")
    for suffix in EXTENSION_SUFFIXES:
        file = _PACKAGE / f"{stem}{suffix}"
        if file.is_file():
            return file
    return None


def _load(name: str, load: Callable[[str], object]) -> ModuleReport:
    """Loads the file of a module in this package."""
    path = _file_of(name)
    if path is None:
        return ModuleReport(name, None, "not built")
    try:
        load(str(path))
    except (ImportError, OSError) as error:  # such as a linker error: built for another torch or CUDA
        return ModuleReport(name, None, f"{path.name} cannot be loaded: {error}")
    return ModuleReport(name, path, None)


def _load_cpu() -> ModuleReport:
    report = _load("esper._C", torch.ops.load_library)
    if report.loaded:
        return report

    target = ""
    built = build_info().get("torch")
    if built:
        target = f" It was built with torch {built}; this is torch {torch.__version__}."
    raise ImportError(
        f"Esper's compiled module esper._C is missing in {_PACKAGE}: {report.reason}.{target} "
        f"Build it, from the root of the repository: {REPAIR_COMMAND}{_why_here()}"
    )


def _why_here() -> str:
    """Explains an uncompiled folder that was imported only because Python was started beside it."""
    root = _PACKAGE.parent
    if root != Path.cwd().resolve():
        return ""
    for entry in sys.path:
        other = Path(entry or ".").resolve() / _PACKAGE.name
        if other != _PACKAGE and any(other.glob("_C*")):
            return f"; or start Python outside of {root}, or with -P: {other} is compiled"
    return ""


def _load_cuda() -> ModuleReport:
    if torch.version.cuda is None:
        return ModuleReport("esper._C_cuda", None, "the installed torch is a CPU build")
    report = _load("esper._C_cuda", torch.ops.load_library)
    if report.reason == "not built":
        why = build_info().get("cuda", {}).get("reason", "no record of the build")
        return ModuleReport(report.name, None, f"not built: {why}")
    return report


def native_required(environment: Mapping[str, str] = os.environ) -> bool:
    """True if ``ESPER_REQUIRE_NATIVE`` is 1, False if it is unset, empty or 0. Raises ValueError for other values."""
    value = environment.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE} is {value!r}; 1 makes every fallback an error, 0 allows them")
    return value == "1"


def refuse_fallback(what: str, reason: str) -> None:
    """Raises RuntimeError if ``ESPER_REQUIRE_NATIVE`` is 1; code with a fallback calls it each time before using it.

    Args:
        what: the code that falls back, and its fallback.
        reason: why the native kernel cannot be used.
    """
    if native_required():
        raise RuntimeError(f"{VARIABLE}=1, but {what}: {reason}")


def require_native(environment: Mapping[str, str], cuda: ModuleReport, gpu: bool) -> None:
    """Raises ``ImportError`` if ``ESPER_REQUIRE_NATIVE`` is 1 and a GPU would run without the CUDA module."""
    if native_required(environment) and gpu and not cuda.loaded:
        raise ImportError(
            f"{VARIABLE}=1, but {cuda.name} is missing: {cuda.reason}. "
            f"To see why, build it strictly: ESPER_CUDA=1 {REPAIR_COMMAND}"
        )


_CPU = _load_cpu()
_CUDA = _load_cuda()
require_native(os.environ, _CUDA, torch.cuda.is_available())


def cuda_loaded() -> bool:
    """True if the operators have CUDA kernels."""
    return _CUDA.loaded


def modules() -> list[ModuleReport]:
    """Reports all compiled modules, loaded or not: ``esper._C``, ``esper._C_cuda``, ``esper._runtime``."""
    runtime = _load("esper._runtime", lambda _: importlib.import_module("esper._runtime"))
    return [_CPU, _CUDA, runtime]


_library = torch.library.Library("esper", "IMPL")  # type: ignore[no-untyped-call]


def not_differentiable(*names: str, in_place: bool = False) -> None:
    """Makes autograd ignore these operators: results do not require grad, even if arguments do.

    Operators that only write ``in_place`` also get their fake kernel here, which does nothing.
    """
    for name in names:
        _library.impl(name, torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]
        if in_place:
            torch.library.register_fake(f"esper::{name}", lambda *_, **__: None)


def writing(operator: Any) -> Callable[..., None]:
    """Returns ``operator``, which writes into arguments, as a function that raises their versions.

    Autograd ignores the operator, and would otherwise not notice that a tensor that it has saved was changed.
    """
    written = [
        (place, argument.name)
        for place, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]

    def call(*arguments: Any, **named: Any) -> None:
        refuse_forward_mode(operator._schema.name)
        try:
            operator(*arguments, **named)
        finally:
            if not torch.compiler.is_compiling():  # the compiler raises them by itself
                for place, name in written:
                    argument = arguments[place] if place < len(arguments) else named.get(name)
                    if argument is not None:
                        torch.autograd.graph.increment_version(argument)

    return call


def refuse_forward_mode(name: str) -> None:
    """Raises NotImplementedError while forward-mode derivatives are computed, which the operator would leave out."""
    if forward_ad._current_level >= 0:
        raise NotImplementedError(
            f"{name} cannot be differentiated in forward mode (jvp, jacfwd, dual numbers); use reverse mode, or the "
            "functions of PyTorch"
        )


def built_with() -> str:
    """Returns the compiler, torch headers and CPU instruction sets that the CPU module reports."""
    return cast(str, torch.ops.esper.built_with())


class Once(torch.autograd.Function):
    """A gradient as a function of what it was computed from, so that differentiating it again is an error.

    ``apply(message, gradient, *inputs)`` returns the gradient; the error has the message.
    """

    @staticmethod
    def forward(ctx: Any, message: str, gradient: Tensor, *inputs: Tensor) -> Tensor:
        ctx.message = message
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(ctx.message)
