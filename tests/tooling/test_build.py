"""The build's decisions, tested without building."""

import re
import site
import stat
import sys
import tomllib
from pathlib import Path

import pytest

from build_support import check_cuda_compiles, cuda, extensions, find_torch

ROOT = Path(__file__).resolve().parents[2]


def toolkit(
    folder: Path, name: str, nvcc: str | None = "exit 0", header: bool = True
) -> Path:
    """A directory that looks like a CUDA toolkit; `nvcc` is a shell script."""
    home = folder / name
    (home / "bin").mkdir(parents=True)
    (home / "include").mkdir()
    if header:
        (home / "include" / "cuda_runtime.h").touch()
    if nvcc is not None:
        compiler = home / "bin" / "nvcc"
        compiler.write_text(f"#!/bin/sh\n{nvcc}\n")
        compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    return home


def test_a_toolkit_needs_header_and_compiler(tmp_path: Path) -> None:
    good = toolkit(tmp_path, "good")
    for name in (
        toolkit(tmp_path, "headerless", header=False),
        toolkit(tmp_path, "no-compiler", nvcc=None),
    ):
        assert name not in cuda.toolkit_candidates({"CUDA_HOME": str(name), "PATH": ""})
    assert cuda.toolkit_candidates({"CUDA_HOME": str(good), "PATH": ""})[0] == good
    assert cuda.toolkit_candidates({"CUDA_PATH": str(good), "PATH": ""})[0] == good


def test_an_nvcc_wrapper_elsewhere_on_the_path_is_not_a_toolkit(tmp_path: Path) -> None:
    wrapper = toolkit(tmp_path, "usr-local", header=False)
    assert wrapper not in cuda.toolkit_candidates({"PATH": str(wrapper / "bin")})
    real = toolkit(tmp_path, "real")
    assert real in cuda.toolkit_candidates({"PATH": str(real / "bin")})


def test_cuda_is_judged_by_the_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = toolkit(tmp_path, "good")
    bad = toolkit(
        tmp_path, "bad", nvcc="echo 'probe.cu(2): error: wrong major' >&2; exit 1"
    )
    monkeypatch.setattr(cuda, "toolkit_candidates", lambda environment: [bad, good])
    decision = cuda.decide("13.0", {})
    assert (decision.build, decision.home) == (True, good)
    monkeypatch.setattr(cuda, "toolkit_candidates", lambda environment: [bad])
    decision = cuda.decide("13.0", {})
    assert not decision.build
    assert "bad: probe.cu(2): error: wrong major" in decision.reason


@pytest.mark.parametrize("torch_cuda", [None, "13.0"])
def test_strict_mode_fails_and_auto_degrades(
    torch_cuda: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "toolkit_candidates", lambda environment: [])
    decision = cuda.decide(torch_cuda, {})
    assert not decision.build
    with pytest.raises(SystemExit, match="ESPER_CUDA=1 asks for CUDA kernels"):
        cuda.decide(torch_cuda, {"ESPER_CUDA": "1"})


def test_cuda_can_be_switched_off_and_modes_are_checked() -> None:
    assert (
        cuda.decide("13.0", {"ESPER_CUDA": "0"}).reason
        == "switched off by ESPER_CUDA=0"
    )
    with pytest.raises(
        SystemExit, match=r"ESPER_CUDA='yes' is not one of: auto .*, 0 .*, 1"
    ):
        cuda.decide("13.0", {"ESPER_CUDA": "yes"})


@pytest.mark.parametrize(
    ("arguments", "builds"),
    [
        (["setup.py", "egg_info"], False),
        (["setup.py", "sdist"], False),
        (["setup.py", "build_ext", "--inplace"], True),
        (["setup.py", "bdist_wheel"], True),
    ],
)
def test_only_build_commands_need_torch(arguments: list[str], builds: bool) -> None:
    assert find_torch.is_build(arguments) is builds


@pytest.mark.parametrize(
    ("version", "too_old"),
    [
        ("2.10.1", True),
        ("2.11.0a0+git", False),
    ],
)
def test_old_torch_is_recognised(version: str, too_old: bool) -> None:
    assert find_torch.is_too_old(version) is too_old


def test_every_kernel_is_compiled_for_the_oldest_and_the_newest_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = f'echo "$@" >> {tmp_path}/calls; case "$*" in *bad.cu*c++17*) echo "error: no"; exit 1; esac'
    nvcc = toolkit(tmp_path, "recording", nvcc=record) / "bin/nvcc"
    assert check_cuda_compiles.compile_all(nvcc, [Path("good.cu")])
    assert not check_cuda_compiles.compile_all(nvcc, [Path("good.cu"), Path("bad.cu")])
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 6
    targets = [
        re.findall(r"-std=(\S+) -gencode=arch=compute_(\d+),code=sm_(\d+)", call)[0]
        for call in calls
    ]
    assert sorted(targets) == [("c++17", "80", "80")] * 3 + [("c++20", "90", "90")] * 3
    assert sorted(call.split()[1] for call in calls) == ["bad.cu"] * 2 + ["good.cu"] * 4
    assert "error: no\nbad.cu as c++17 for sm_80: FAILED" in capsys.readouterr().out


def test_stale_modules_are_deleted(tmp_path: Path) -> None:
    for name in (
        "_C.abi3.so",
        "_C_cuda.abi3.so",
        "_runtime.cpython-311-x86_64-linux-gnu.so",
        "other.so",
    ):
        (tmp_path / name).touch()
    extensions.remove_stale(tmp_path, {"esper._C", "esper._runtime"})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "_C.abi3.so",
        "_runtime.cpython-311-x86_64-linux-gnu.so",
        "other.so",
    ]


def test_modules_follow_the_decision() -> None:
    without = extensions.modules(cuda.CudaDecision(False, "no"))
    assert [module.name for module in without] == ["esper._C", "esper._runtime"]
    sources = {source for module in without for source in module.sources}
    assert sources >= {
        "csrc/library.cpp",
        "csrc/cpu/grad_stats.cpp",
        "csrc/runtime/module.cpp",
    }
    assert "csrc/grad_stats.h" in without[0].depends


def test_torch_is_not_a_build_requirement_and_its_range_holds_the_fallback() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert not any(
        requirement.startswith("torch")
        for requirement in project["build-system"]["requires"]
    )
    assert "torch>=2.11,<2.16" in project["project"]["dependencies"]
    assert find_torch.FALLBACK_TORCH == "torch==2.13.0"


@pytest.mark.parametrize(
    ("prefix", "config", "seen"),
    [
        ("base", None, True),
        ("venv", "include-system-site-packages = false", False),
        ("venv", "include-system-site-packages = true", True),
    ],
)
def test_a_torch_in_the_users_folder_is_found_where_the_target_would_import_it(
    prefix: str,
    config: str | None,
    seen: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """pip's isolation sets PYTHONNOUSERSITE, which the target does not have."""
    if config is not None:
        (tmp_path / "pyvenv.cfg").write_text(f"home = /usr/bin\n{config}\n")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(
        sys, "base_prefix", str(tmp_path if prefix == "base" else "/usr")
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(site, "getusersitepackages", lambda: "/user/site")
    monkeypatch.setenv("PYTHONNOUSERSITE", "1")
    find_torch.see_target_packages()
    assert ("/user/site" in sys.path) is seen
    assert not seen or sys.path[-1] == "/user/site"
