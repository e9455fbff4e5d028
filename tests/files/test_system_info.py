"""The env.json of a run: source, versions and hardware."""

import subprocess
from pathlib import Path

import esper
from esper.files.system_info import describe_environment, source


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
    done = subprocess.run(
        ("git", "-C", str(folder), *identity, *arguments),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_the_source_is_the_commit_of_a_checkout_and_whether_it_was_changed(
    tmp_path: Path,
) -> None:
    git(tmp_path, "init", "--quiet")
    file = tmp_path / "file.txt"
    file.write_text("first")
    git(tmp_path, "add", "file.txt")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    (tmp_path / "untracked.txt").write_text("a run's output")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert source(tmp_path) == {"commit": commit, "dirty": False}
    file.write_text("second")
    assert source(tmp_path) == {"commit": commit, "dirty": True}


def test_without_a_checkout_there_is_no_source(tmp_path: Path) -> None:
    assert source(tmp_path) is None
    git(tmp_path, "init", "--quiet")  # without any commit
    assert source(tmp_path) is None


def test_the_environment_has_the_version_of_this_package() -> None:
    assert describe_environment()["packages"]["esper"] == esper.__version__
