"""The launch loop of CUDA streams and its runtime, on a runtime without a device."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from esper._runtime import CudaRuntime, StopFlag
from tests.runtime.fake_cudart import Fake, compile_fake

PATIENCE = 30.0
"""Seconds after which a test that waits fails instead of hanging."""


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    """A library of its own for each test: it is never unloaded."""
    return Fake(compile_fake(tmp_path))


@pytest.fixture
def runtime(fake: Fake) -> CudaRuntime:
    return CudaRuntime(str(fake.path))


def test_batch_major_and_each_stream_as_long_as_it_is(
    fake: Fake, runtime: CudaRuntime
) -> None:
    result = runtime.launch(1, [10, 20, 30], [1, 2, 3], [2, 0, 3])
    assert fake.launches == [(10, 1), (30, 3), (10, 1), (30, 3), (30, 3)]
    assert fake.launch_devices == {1}
    assert (result.launched, result.failures, result.stopped) == ([2, 0, 3], [], False)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 6), max_size=6))
def test_any_numbers_of_steps(
    fake: Fake, runtime: CudaRuntime, steps: list[int]
) -> None:
    fake.launch_count = 0
    streams = range(len(steps))
    result = runtime.launch(
        0, [100 + i for i in streams], [1 + i for i in streams], steps
    )
    assert fake.launches == [
        (100 + i, 1 + i)
        for step in range(max(steps, default=0))
        for i in streams
        if step < steps[i]
    ]
    assert result.launched == steps


@pytest.mark.trap(35)
def test_every_stream_is_a_new_one_on_its_device(
    fake: Fake, runtime: CudaRuntime
) -> None:
    streams = [runtime.create_stream(i % 2) for i in range(80)]
    assert len(set(streams)) == 80
    non_blocking = 1
    assert fake.calls == [
        ("S", i % 2, stream, non_blocking) for i, stream in enumerate(streams)
    ]
    runtime.launch(0, [7], [streams[0]], [1])
    assert fake.launch_devices == {0}


def test_the_device_of_the_thread_is_put_back(fake: Fake, runtime: CudaRuntime) -> None:
    fake.library.cudaSetDevice(0)
    runtime.create_stream(1)
    assert fake.current_device == 0
    runtime.launch(1, [7], [1], [1])
    assert fake.current_device == 0
    assert fake.launch_devices == {1}


def test_no_context_is_made_on_a_device_that_is_not_used(
    fake: Fake, runtime: CudaRuntime
) -> None:
    """The current device is 0, which another process may be using; it gets no context until it is used."""
    runtime.launch(1, [7], [runtime.create_stream(1)], [1])
    assert fake.contexts == {1}
    runtime.create_stream(0)
    assert fake.contexts == {0, 1}


@pytest.mark.parametrize(
    "version",
    [
        0,
        13020,
    ],
)
def test_the_driver_reports_its_cuda_version(
    fake: Fake, runtime: CudaRuntime, version: int
) -> None:
    fake.driver_version = version
    assert runtime.driver_version() == version
    assert fake.contexts == set()


def test_an_error_ends_its_stream_only_and_leaves_none_for_torch(
    fake: Fake, runtime: CudaRuntime
) -> None:
    fake.bad_graph, fake.bad_step, fake.code = 20, 2, 719
    result = runtime.launch(0, [10, 20, 30], [1, 2, 3], [4, 4, 4])
    assert result.failures == [(1, 2, 719, "made to fail (CUDA error 719)")]
    assert result.launched == [4, 2, 4]
    assert not result.stopped
    assert fake.launches == [(10, 1), (20, 2), (30, 3)] * 2 + [(10, 1), (30, 3)] * 2
    assert fake.last_error == 0, "torch would find it after its next call"


def test_a_device_that_is_not_there(fake: Fake, runtime: CudaRuntime) -> None:
    words = r"cudaSetDevice: invalid device ordinal \(CUDA error 101\)"
    with pytest.raises(RuntimeError, match=words):
        runtime.launch(2, [10], [1], [1])
    with pytest.raises(RuntimeError, match=words):
        runtime.create_stream(-1)
    assert fake.launches == []
    assert fake.last_error == 0


def soon(fake: Fake, act: Callable[[], None]) -> threading.Thread:
    """Another Python thread that acts when the fake is being called: it can only if that caller gave the GIL away."""

    def wait_and_act() -> None:
        waiting = threading.Event()
        while not fake.somebody_waits:
            waiting.wait(0.001)
        act()
        fake.gate_closed = 0

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    return thread


def test_python_runs_beside_the_loop_and_may_stop_it_between_steps(
    fake: Fake, runtime: CudaRuntime
) -> None:
    stop = StopFlag()
    fake.gate_closed = 1
    thread = soon(fake, stop.set)
    result = runtime.launch(0, [10, 20], [1, 2], [5, 5], stop)
    thread.join(PATIENCE)
    assert result.stopped
    assert result.failures == []
    assert result.launched == [1, 1], "the step that was begun is whole"
    assert runtime.launch(0, [10], [1], [3], stop).launched == [0]
    stop.clear()
    assert not stop.is_set
    assert runtime.launch(0, [10], [1], [3], stop).launched == [3]


@pytest.mark.parametrize(
    ("graphs", "streams", "steps", "words"),
    [
        ([1, 2], [1], [1, 1], "2 graphs, 1 streams and 2 numbers of steps"),
        ([1], [1], [], "1 graphs, 1 streams and 0 numbers of steps"),
        ([1, 0], [1, 2], [1, 1], "stream 1 has no graph: its handle is 0"),
        ([1], [1], [-3], "stream 0 has -3 steps"),
    ],
)
def test_bad_streams_are_refused(
    fake: Fake,
    runtime: CudaRuntime,
    graphs: list[int],
    streams: list[int],
    steps: list[int],
    words: str,
) -> None:
    with pytest.raises(ValueError, match=words):
        runtime.launch(0, graphs, streams, steps)
    assert fake.launches == []


def test_a_runtime_that_lacks_functions_is_named(tmp_path: Path) -> None:
    old = compile_fake(tmp_path, "libold.so", "-DOLD")
    with pytest.raises(
        RuntimeError,
        match=r"libold\.so lacks cudaGraphLaunch, which CUDA 12 and 13 have",
    ):
        CudaRuntime(str(old))
    with pytest.raises(
        RuntimeError,
        match=r"lacks cudaDriverGetVersion, cudaGetDevice, .*cudaGraphLaunch",
    ):
        CudaRuntime("libc.so.6")
    with pytest.raises(
        RuntimeError, match=r"no CUDA runtime can be loaded: .*nowhere\.so"
    ):
        CudaRuntime(str(tmp_path / "nowhere.so"))


def child(body: str) -> str:
    """Returns the output of a fresh process without torch."""
    head = "import ctypes, os, signal, sys, threading, time\nfrom esper._runtime import CudaRuntime, StopFlag\n"
    done = subprocess.run(
        [sys.executable, "-c", head + body], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_without_a_runtime_the_error_names_what_was_looked_for() -> None:
    said = child("try: CudaRuntime()\nexcept RuntimeError as error: print(error)")
    assert said.startswith(
        "no CUDA runtime is loaded in this process: looked for libcudart.so.13, libcudart.so.12, and any libcudart*"
    )


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="names of Linux libraries"
)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("libcudart.so.13", ["-Wl,-soname,libcudart.so.13"]),
        ("libcudart-d0da41ae.so.11.0", []),
    ],
)
def test_the_runtime_that_is_loaded_is_found(
    tmp_path: Path, name: str, options: list[str]
) -> None:
    path = compile_fake(tmp_path, name, *options)
    body = f"""
library = ctypes.CDLL({str(path)!r})
runtime = CudaRuntime()
assert os.path.samefile(runtime.path, {str(path)!r}), runtime.path
runtime.launch(0, [5], [1], [4])
print(ctypes.c_int.in_dll(library, "fake_launch_count").value)"""
    assert child(body) == "4\n"


def test_ctrl_c_stops_the_loop_and_is_raised_when_the_streams_are_idle(
    tmp_path: Path,
) -> None:
    path = compile_fake(tmp_path)
    body = f"""
signal.signal(signal.SIGINT, signal.default_int_handler)
library = ctypes.CDLL({str(path)!r})
variable = lambda name: ctypes.c_int.in_dll(library, "fake_" + name)
variable("delay_us").value, variable("busy_queries").value = 1000, 50
threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    CudaRuntime({str(path)!r}).launch(0, [1, 2], [1, 2], [50_000, 50_000])
except KeyboardInterrupt:
    launched, busy = variable("launch_count").value, variable("busy_queries").value
    print(0 < launched < 10_000, launched % 2, busy)
variable("busy_queries").value = 10**9
for seconds in (0.2, 0.5):
    threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    CudaRuntime({str(path)!r}).launch(0, [1], [1], [50_000])
except KeyboardInterrupt:
    print("left a wait without end")"""
    assert child(body) == "True 0 0\nleft a wait without end\n"


@pytest.mark.skipif(shutil.which("ldd") is None, reason="there is no ldd")
def test_the_module_links_no_cuda_library() -> None:
    from esper import _runtime

    assert _runtime.__file__ is not None
    linked = subprocess.run(
        ["ldd", _runtime.__file__], capture_output=True, text=True, check=True
    ).stdout
    assert "cuda" not in linked
