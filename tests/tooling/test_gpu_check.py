"""The check on a GPU: steps that hang, crash or fail leave their mark and do not take others along.

Nothing here needs a GPU: the steps are small commands that behave like the real ones.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import plan, summary
from benchmarks.gpu.runner import Result, Step, run_all
from esper.bench import CASES

ROOT = Path(__file__).resolve().parents[2]
ORDER = ["machine", "packages", "build", "import", "kernels", "memcheck", "streams"]
ORDER += ["racecheck", "synccheck", "initcheck", "bench", "run"]

# A plan in a process of its own, ended by a signal while its second step runs.
ENDED = """
import sys
from pathlib import Path
from benchmarks.gpu.__main__ import check
from benchmarks.gpu.runner import Step
folder = Path(sys.argv[1])
hang = f"echo $$ > {folder}/pid; echo working; exec sleep 60"
scripts = {"first": "echo done", "second": hang, "third": "true"}
steps = [Step(name, 60, ["bash", "-c", script]) for name, script in scripts.items()]
sys.exit(check(steps, folder, folder / "gpu_check.tar.gz"))
"""


def shell(
    name: str,
    script: str,
    limit: float = 20,
    needs: tuple[str, ...] = (),
    sanitizer: bool = False,
) -> Step:
    return Step(
        name, limit, ["bash", "-c", script], needs, tests=sanitizer, sanitizer=sanitizer
    )


def run_fakes(folder: Path, *steps: Step) -> dict[str, Result]:
    return {
        result.step: result for result in run_all(steps, folder, lambda results: None)
    }


def archived(file: Path) -> dict[str, bytes]:
    with tarfile.open(file) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU, and the script would use it"
)
def test_without_a_gpu_every_step_is_skipped_with_the_reason(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "gpu_check.sh"
    found = subprocess.run(
        ["bash", script, "out", "--archive", "all.tar.gz"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHON": sys.executable},
    )
    assert found.returncode == 0, found.stderr
    facts = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert {(step["status"], step["says"]) for step in facts["steps"]} == {
        ("skipped", "no GPU that torch can use")
    }
    assert any(line.startswith("PyTorch ") for line in facts["machine"])
    page = (tmp_path / "out" / "summary.md").read_text()
    assert "| memcheck | skipped | 0.0 | no GPU that torch can use |" in page
    assert archived(tmp_path / "all.tar.gz")["gpu_check/summary.md"].decode() == page
    again = subprocess.run(
        ["bash", script, "out"], capture_output=True, text=True, cwd=tmp_path
    )
    assert again.returncode == 2
    assert "is not empty; name a new folder" in again.stderr


def test_the_plan_is_in_order_and_its_limits_add_up_to_the_budget(
    tmp_path: Path,
) -> None:
    steps = plan.make_plan(tmp_path, tmp_path / "site", None)
    names = [step.name for step in steps]
    assert (
        list(
            dict.fromkeys(
                name if name in ORDER else name.split("-")[0] for name in names
            )
        )
        == ORDER
    )
    assert len(set(names)) == len(names)
    assert sum(step.limit for step in steps) == pytest.approx(plan.BUDGET)
    assert plan.BUDGET <= 570
    for step in steps:
        assert set(step.needs) <= set(names[: names.index(step.name)]), (
            "only earlier steps can be needed"
        )


def test_every_test_for_a_gpu_has_a_step_and_every_kernel_a_file() -> None:
    files = {
        f"tests/cuda/{file.name}" for file in (ROOT / "tests/cuda").glob("test_*.py")
    }
    selections = plan.stream_selections()
    assert {
        *plan.kernel_files(),
        *(test.split("::")[0] for tests in selections for test in tests),
    } == files
    kernels = {file.stem for file in (ROOT / "csrc/cuda").glob("*.cu")}
    kernels = kernels - {"adamw", "sgd"} | {"optimizer"}
    assert {f"tests/cuda/test_{name}.py" for name in kernels} <= {*plan.kernel_files()}
    selected = [test for tests in selections for test in tests]
    there = [
        f"tests/cuda/{name}::{test}"
        for name in plan.STREAM_FILES
        for test in re.findall(
            r"^def (test_\w+)",
            (ROOT / "tests/cuda" / name).read_text(),
            flags=re.MULTILINE,
        )
    ]
    assert sorted(selected) == sorted(there)
    assert max(map(len, selections)) <= plan.SELECTION


def test_memory_is_not_cached_under_memcheck_and_is_in_streams(tmp_path: Path) -> None:
    steps = plan.make_plan(tmp_path, tmp_path / "site", None)
    uncached = {
        step.name
        for step in steps
        if step.environment.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1"
    }
    assert uncached == {"memcheck", "initcheck"}
    assert {step.name for step in steps if step.sanitizer} == {
        "memcheck",
        "racecheck",
        "synccheck",
        "initcheck",
    }
    for step in steps:
        assert step.tests == any(
            "--junitxml" in argument for argument in step.command
        ), step.name


def test_cases_that_are_measured_exist() -> None:
    assert {case for cases in plan.MEASURED.values() for case in cases} <= CASES.keys()


def test_steps_that_fail_crash_hang_or_cannot_run_leave_the_others(
    tmp_path: Path,
) -> None:
    found = run_fakes(
        tmp_path,
        shell("fails", "echo 'it broke'; exit 3"),
        shell("crashes", "echo 'half way'; kill -SEGV $$"),
        shell("hangs", "echo 'last words'; sleep 60", limit=0.34),
        shell("cannot", "echo 'no such device'; exit 77"),
        Step("absent", 1, ["no-such-tool"]),
        shell("works", "echo all; echo 'is well'; echo"),
    )
    assert [(r.step, r.status, r.says) for r in found.values()] == [
        ("fails", "failed", "it broke"),
        ("crashes", "failed", "killed by SIGSEGV; half way"),
        ("hangs", "failed", "stopped after 1 s; last words"),
        ("cannot", "skipped", "no such device"),
        ("absent", "skipped", "no no-such-tool on this machine"),
        ("works", "ok", "is well"),
    ]


def test_a_step_runs_only_after_all_that_it_needs(tmp_path: Path) -> None:
    found = run_fakes(
        tmp_path,
        shell("cannot", "echo 'no GPU'; exit 77"),
        shell("fails", "echo 'it broke'; exit 1"),
        shell("works", "true"),
        shell("after-cannot", "true", needs=("works", "cannot")),
        shell("after-that", "true", needs=("after-cannot",)),
        shell("after-fails", "true", needs=("fails",)),
        shell("after-works", "true", needs=("works",)),
    )
    assert [(r.status, r.says) for r in list(found.values())[3:]] == [
        ("skipped", "no GPU"),
        ("skipped", "no GPU"),
        ("skipped", "needs fails, which failed: it broke"),
        ("ok", ""),
    ]


def test_a_step_leaves_no_process_behind(tmp_path: Path) -> None:
    found = run_fakes(
        tmp_path, shell("leaves", f"sleep 60 & echo $! > {tmp_path}/child")
    )
    assert found["leaves"].status == "ok"
    wait_for_the_end_of((tmp_path / "child").read_text().strip())


def wait_for_the_end_of(process: str) -> None:
    """Fails if the process does not end; a killed one does within a moment, and a zombie waits for the init process."""
    stat = Path("/proc", process, "stat")
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if " Z " not in stat.read_text():
                time.sleep(0.05)
                continue
        return
    pytest.fail("the child still runs")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_ended_check_leaves_a_summary_and_an_archive(
    tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-c", ENDED, str(tmp_path)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline().startswith("first ")
        log = tmp_path / "second.log"
        while not (log.is_file() and "working" in log.read_text()):
            time.sleep(0.02)
        run.send_signal(number)
        output, _ = run.communicate(timeout=20)
    kept = {
        name: json.loads(content)
        for name, content in archived(tmp_path / "gpu_check.tar.gz").items()
        if "json" in name
    }
    steps = [
        (step["step"], step["status"], step["says"])
        for step in kept["gpu_check/summary.json"]["steps"]
    ]
    assert steps[0] == ("first", "ok", "done")
    if number == signal.SIGKILL:
        assert len(steps) == 1
        os.kill(
            int((tmp_path / "pid").read_text()), signal.SIGKILL
        )  # no other process would end it
        return
    assert run.returncode == 128 + number
    assert steps[1:] == [
        ("second", "failed", f"stopped by {number.name}; working"),
        ("third", "skipped", f"stopped by {number.name}"),
    ]
    assert f"archive: {tmp_path / 'gpu_check.tar.gz'}" in output


def test_the_page_shows_the_machine_steps_measurements_and_failures(
    tmp_path: Path,
) -> None:
    (tmp_path / "machine.json").write_text('["GPU: one", "Driver: 580"]')
    head = "| case | ratio |\n| --- | --- |\n"
    (tmp_path / "bench-operators.md").write_text(
        f"# esper-bench\n\n{head}| sgd | 2.00 |\n"
    )
    (tmp_path / "bench-training.md").write_text(
        f"# esper-bench\n\n{head}| validate | 3.00 |\n"
    )
    (tmp_path / "bench-operators.json").write_text('[{"case": "sgd"}]')
    (tmp_path / "bench-training.json").write_text(
        '[{"case": '
    )  # ended while it was written
    (tmp_path / "build.log").write_text(f"one\nerror in {ROOT}/csrc/cuda/sgd.cu\n")
    results = [
        Result("build", "failed", 3.25, f"{ROOT}/x | y"),
        Result("run", "ok", 1.0, "well"),
    ]
    summary.write(results, tmp_path, tmp_path / "a.tar.gz")
    page = (tmp_path / "summary.md").read_text()
    for part in (
        "GPU: one\nDriver: 580",
        "## Steps: 1 ok, 1 failed, 0 skipped",
        "| build | failed | 3.2 | ./x \\| y |",
        f"{head}| sgd | 2.00 |\n| validate | 3.00 |\n",
        "## End of the log of build\n\n```\none\nerror in ./csrc/cuda/sgd.cu\n```",
    ):
        assert part in page
    assert str(ROOT) not in page
    assert json.loads((tmp_path / "summary.json").read_text())["measured"] == [
        {"case": "sgd"}
    ]
    assert (
        io.BytesIO((tmp_path / "a.tar.gz").read_bytes()).getbuffer().nbytes < 16 * 2**20
    )
