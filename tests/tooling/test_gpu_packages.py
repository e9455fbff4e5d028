"""Packages that a bare machine lacks, as the check on a GPU finds them."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks.gpu import packages

ROOT = Path(__file__).resolve().parents[2]


def build_requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return [*project["build-system"]["requires"]]


def install_fake(site: Path, name: str, version: str, *requires: str) -> None:
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    (folder / "METADATA").write_text(
        "\n".join([*lines, *(f"Requires-Dist: {line}" for line in requires)]) + "\n"
    )


def make_wheel(folder: Path, name: str, version: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        info = f"{name}-{version}.dist-info"
        wheel.writestr(f"{name}.py", f"version = {version!r}\n")
        wheel.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        )
        wheel.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{info}/RECORD", "")


def test_packages_are_those_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = {Requirement(line).name for line in project["project"]["dependencies"]}
    assert names > packages.UNUSED
    assert {need.name for need in packages.required()} == (
        names - packages.UNUSED
        | {Requirement(line).name for line in build_requirements()}
        | packages.TEST_PACKAGES
    )


def test_all_that_is_missing_is_found_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake(
        tmp_path,
        "fake_a",
        "1.5",
        "fake-absent>=2",
        'fake-old; python_version < "3"',
        "fake-b",
    )
    install_fake(
        tmp_path,
        "fake_b",
        "2.0",
        'fake-extra; extra == "more"',
        "fake-a",
        "Fake_Absent",
    )
    monkeypatch.syspath_prepend(tmp_path)
    needs = [
        Requirement(line)
        for line in (
            "fake-a>=2",
            "numpy",
            "fake-gone[more]>=3,<4",
            "fake-b",
            "torch>=2.11",
        )
    ]
    missing = packages.missing(needs)
    assert [need.name for need in missing] == ["fake-a", "Fake_Absent", "fake-gone"]
    command = packages.download_command(missing)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert command.startswith(
        f"python -m pip download --only-binary=:all: --python-version {version} --dest wheels "
    )
    assert command.endswith("'fake-a>=2' 'Fake_Absent>=2' 'fake-gone<4,>=3'")


def test_wheels_go_into_a_folder_of_their_own_and_replace_nothing(
    tmp_path: Path,
) -> None:
    wheels, target = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    for name, version in (
        ("fake_need", "1.9"),
        ("fake_need", "1.10"),
        ("torch", "99.0"),
        ("numpy", "99.0"),
    ):
        make_wheel(wheels, name, version)
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu.packages",
        "--wheels",
        str(wheels),
        "--target",
        str(target),
    ]
    for line in build_requirements():
        install_fake(tmp_path / "build", Requirement(line).name, "99.0")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "build")}
    found = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "installing from wheels: fake_need-1.10-py3-none-any.whl\n" in found.stdout
    assert sorted(path.name for path in target.iterdir()) == [
        "fake_need-1.10.dist-info",
        "fake_need.py",
    ]
