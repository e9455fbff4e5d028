"""Build of the emulated kernels: translate ``csrc/cuda``, compile what has changed, link a shared library.

Everything lies in ``build/emulation``, which git ignores, under names that are digests of what it was made from. One
process builds at a time; others wait, and find what it has made.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch.utils import cpp_extension

from build_support.extensions import TORCH_TARGET
from tests.emulation.translate import operators, translate

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
OWN = Path(__file__).resolve().parent
FOLDER = ROOT / "build" / "emulation"

COMMON = (
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    "-g1",
    "-Wall",
    "-Wextra",
    "-Werror",
)
# The handlers of these two checks are in bounds.cpp.
CHECKED = ("-O1", "-fsanitize=alignment,bounds")
SANITIZED = (
    "-O1",
    "-DEMULATED_SANITIZERS",
    "-fsanitize=address,undefined",
    "-fno-sanitize=vptr",  # torch's classes are not under test
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
)
WARNINGS_OFF = ("-Wno-unknown-pragmas", "-Wno-maybe-uninitialized", "-Wno-array-bounds")


@dataclass(frozen=True)
class Edit:
    """One change of a source before it is compiled: ``old`` occurs exactly once in ``csrc/<file>``."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class EmulatedLibrary:
    """A shared library that registers operators for the CPU under its own namespace."""

    path: Path
    namespace: str
    operators: tuple[str, ...]


def compiler() -> str:
    """The C++ compiler: ``$CXX``, or g++.

    Raises:
        RuntimeError: no compiler was found.
    """
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        raise RuntimeError(
            f"the emulated CUDA kernels need a C++ compiler, and {name} is not on the PATH; set CXX"
        )
    return name


@cache
def _compiler_version(name: str) -> str:
    return subprocess.run(
        [name, "--version"], capture_output=True, text=True, check=True
    ).stdout


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _cuda_sources() -> list[Path]:
    return sorted(
        [
            *CSRC.glob("*.h"),
            *(
                path
                for path in CSRC.glob("cuda/*")
                if path.suffix in (".cu", ".cuh", ".h")
            ),
        ]
    )


def _cpp_name(name: str) -> str:
    return f"{name.removesuffix('.cu')}.cpp" if name.endswith(".cu") else name


def _edited(sources: dict[str, str], edits: Sequence[Edit]) -> dict[str, str]:
    sources = dict(sources)
    for edit in edits:
        count = sources[edit.file].count(edit.old)
        if count != 1:
            raise ValueError(
                f"the text to replace occurs {count} times in csrc/{edit.file}, not once: {edit.old!r}"
            )
        sources[edit.file] = sources[edit.file].replace(edit.old, edit.new)
    return sources


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)


def _run(command: list[str]) -> None:
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{finished.stdout}{finished.stderr}")


def _compile(source: Path, flags: Sequence[str], digest: str) -> Path:
    """The object file of one source; made unless one with this digest is there."""
    made = FOLDER / "objects" / f"{source.stem}-{digest}.o"
    if not made.is_file():
        made.parent.mkdir(parents=True, exist_ok=True)
        new = made.with_suffix(f".{os.getpid()}")
        _run([compiler(), *flags, "-c", str(source), "-o", str(new)])
        new.replace(made)
    return made


def build(
    units: Sequence[str] = (),
    *,
    namespace: str = "esper_emulated",
    edits: Sequence[Edit] = (),
    sanitizers: bool = False,
    extra: Sequence[Path] = (),
) -> EmulatedLibrary:
    """Compile kernels for the CPU, or find what an earlier call compiled.

    Args:
        units: names of ``csrc/cuda/*.cu`` without suffix; all of them if empty.
        namespace: of the operators that the library registers.
        edits: changes of the sources.
        sanitizers: whether address and undefined-behaviour sanitizers take the place of the emulator's own checks; the
            process must then have libasan preloaded.
        extra: CUDA sources that lie elsewhere; ``units`` then names those to compile.

    Raises:
        RuntimeError: no compiler, or an error of the compiler, with its output.
        ValueError: an edit does not fit its file, or a source has syntax that is not translated.
    """
    sources = {
        path.relative_to(CSRC).as_posix(): path.read_text() for path in _cuda_sources()
    }
    shown = {name: f"csrc/{name}" for name in sources}
    for path in extra:
        sources[f"cuda/{path.name}"] = path.read_text()
        shown[f"cuda/{path.name}"] = path.relative_to(ROOT).as_posix()
    sources = _edited(sources, edits)
    units = units or [Path(name).stem for name in sources if name.endswith(".cu")]
    translated = {
        _cpp_name(name): translate(text, shown[name], namespace)
        for name, text in sources.items()
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
        objects = _compile_all(
            translated,
            units,
            [*COMMON, *(SANITIZED if sanitizers else CHECKED), *WARNINGS_OFF],
        )
        library = FOLDER / f"{namespace}-{_digest(*(path.name for path in objects))}.so"
        if not library.is_file():
            _link(objects, library, sanitizers)
    names = [name for unit in units for name in operators(sources[f"cuda/{unit}.cu"])]
    return EmulatedLibrary(library, namespace, tuple(names))


def _compile_all(
    translated: dict[str, str], units: Sequence[str], flags: list[str]
) -> list[Path]:
    """Objects of the units and of the emulator, on all cores."""
    headers = [
        text for name, text in sorted(translated.items()) if not name.endswith(".cpp")
    ]
    headers += [path.read_text() for path in sorted(OWN.glob("include/*.h"))]
    own_headers = [path.read_text() for path in sorted(OWN.rglob("*.h"))]
    made_with = [*flags, _compiler_version(compiler()), torch.__version__]
    folder = FOLDER / f"source-{_digest(*translated, *translated.values())}"
    _write(folder, translated)
    includes = [
        f"-I{OWN / 'include'}",
        *(f"-isystem{path}" for path in cpp_extension.include_paths()),
    ]
    # The emulator itself runs unchecked: it switches stacks and looks at the guards around shared memory.
    plain = [flag for flag in flags if not flag.startswith(("-fsanitize", "-O"))]
    jobs = [
        (
            source,
            [*flags, TORCH_TARGET, *includes],
            _digest(source.read_text(), *headers, *made_with),
        )
        for source in (folder / "cuda" / f"{unit}.cpp" for unit in units)
    ]
    jobs += [
        (
            source,
            [*plain, "-O2", *includes],
            _digest(source.read_text(), *own_headers, *made_with),
        )
        for source in (OWN / "runtime.cpp", OWN / "bounds.cpp")
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda job: _compile(*job), jobs))


def _link(objects: Sequence[Path], library: Path, sanitizers: bool) -> None:
    new = library.with_suffix(f".{os.getpid()}")
    folder = cpp_extension.library_paths()[0]
    links = [
        f"-L{folder}",
        "-ltorch_cpu",
        "-lc10",
        f"-Wl,-rpath,{folder}",
        "-Wl,-Bsymbolic",
    ]
    checks = (
        [flag for flag in SANITIZED if flag.startswith("-fsanitize")]
        if sanitizers
        else []
    )
    _run([compiler(), "-shared", *checks, *map(str, objects), *links, "-o", str(new)])
    new.replace(library)
