"""Loading the compiled modules, and the messages about missing ones."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import esper
from esper.ops import _native
from esper.ops._native import Once

MISSING = _native.ModuleReport("esper._C_cuda", None, "not built: no toolkit")


def test_cpu_and_runtime_modules_are_loaded() -> None:
    reports = {report.name: report for report in _native.modules()}
    assert list(reports) == ["esper._C", "esper._C_cuda", "esper._runtime"]
    for name in ("esper._C", "esper._runtime"):
        assert reports[name].loaded
        assert reports[name].path is not None
        assert reports[name].path.is_file()
        assert reports[name].reason is None


def test_built_with_names_the_headers_it_was_compiled_from() -> None:
    # The record says 2.13.0+cpu, the headers 2.13.0.
    assert _native.build_info()["torch"].split("+")[0] in _native.built_with()


def test_build_record_explains_cuda() -> None:
    record = _native.build_info()["cuda"]
    assert record["reason"]
    assert record["built"] is (record["architectures"] is not None)


def test_requiring_native_is_an_error_only_if_a_gpu_would_fall_back() -> None:
    strict = {"ESPER_REQUIRE_NATIVE": "1"}
    with pytest.raises(ImportError, match=r"no toolkit.*ESPER_CUDA=1 pip install"):
        _native.require_native(strict, MISSING, gpu=True)
    _native.require_native(strict, MISSING, gpu=False)
    _native.require_native({}, MISSING, gpu=True)
    _native.require_native(
        strict, _native.ModuleReport("esper._C_cuda", Path("there.so"), None), gpu=True
    )


@pytest.mark.parametrize(
    ("value", "required"), [(None, False), ("", False), ("0", False), ("1", True)]
)
def test_a_fallback_is_refused_if_native_is_required(
    value: str | None, required: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(_native.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(_native.VARIABLE, value)
    assert _native.native_required() is required
    if required:
        with pytest.raises(
            RuntimeError,
            match=r"^ESPER_REQUIRE_NATIVE=1, but the step runs eager: no graph$",
        ):
            _native.refuse_fallback("the step runs eager", "no graph")
    else:
        _native.refuse_fallback("the step runs eager", "no graph")


@pytest.mark.parametrize(
    "value",
    [
        "yes",
        " 1",
    ],
)
def test_another_value_is_an_error(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_native.VARIABLE, value)
    with pytest.raises(
        ValueError,
        match=r"ESPER_REQUIRE_NATIVE is '.*'; 1 makes every fallback an error, 0 allows",
    ):
        _native.refuse_fallback("the step runs eager", "no graph")


def test_only_one_place_reads_the_variable() -> None:
    """All fallbacks ask one function, so that no fallback can forget the variable."""
    package = Path(esper.__file__).parent
    readers = [
        path
        for path in sorted(package.rglob("*.py"))
        if "getenv" in (text := path.read_text()) or "environ" in text
    ]
    named = [path.name for path in readers if "REQUIRE_NATIVE" in path.read_text()]
    assert named == ["_native.py"]


def _copy_of_package(target: Path, without: str) -> None:
    """The parts of the installed package that importing the operators needs, less one module."""
    source = Path(esper.__file__).parent
    package = target / "esper"
    (package / "ops").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    for path in (source / "ops").glob("*.py"):
        shutil.copy(path, package / "ops")
    for path in source.glob("*.so"):
        if not path.name.startswith(without + "."):
            shutil.copy(path, package)


def _import_ops(folder: Path) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); from esper.ops import _native; print(_native.__file__)"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder
    )


@pytest.mark.slow
def test_a_missing_cpu_module_names_the_repair(tmp_path: Path) -> None:
    _copy_of_package(tmp_path, without="_C")
    done = _import_ops(tmp_path)
    assert done.returncode != 0
    assert (
        "ImportError: Esper's compiled module esper._C is missing: not built."
        in done.stderr
    )
    assert _native.REPAIR_COMMAND in done.stderr


@pytest.mark.slow
def test_a_broken_cpu_module_gives_the_linkers_message(tmp_path: Path) -> None:
    _copy_of_package(tmp_path, without="_C")
    (tmp_path / "esper" / "_C.abi3.so").write_bytes(b"not a library")
    done = _import_ops(tmp_path)
    assert done.returncode != 0
    assert "_C.abi3.so cannot be loaded" in done.stderr
    assert _native.REPAIR_COMMAND in done.stderr


@pytest.mark.slow
def test_operators_load_without_the_other_modules(tmp_path: Path) -> None:
    _copy_of_package(tmp_path, without="_runtime")
    done = _import_ops(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))


def test_a_gradient_is_passed_on_and_differentiating_it_is_an_error() -> None:
    x = torch.tensor([3.0], requires_grad=True)
    gradient = Once.apply("only once", torch.tensor([2.0]), x)
    assert gradient.tolist() == [2.0]
    with pytest.raises(RuntimeError, match="only once"):
        gradient.sum().backward()
