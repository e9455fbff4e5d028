"""CUDA C++ to plain C++: the few pieces of syntax that a C++ compiler does not know become calls of the emulator.

Line numbers stay, so that errors and sanitizers name lines of the CUDA source. Everything else (``__device__``,
``__syncthreads()``, ``threadIdx``) is a macro, a function or a variable of ``include/cuda_runtime.h``.
"""

import re
from collections.abc import Callable

# Names that a CPU build of torch does not have, or that ask whether the compiler is nvcc.
_RENAMED = {
    "torch::stable::accelerator::DeviceGuard": "emulated::DeviceGuard",
    "aoti_torch_get_current_cuda_stream": "emulated::current_stream",
    "STD_CUDA_KERNEL_LAUNCH_CHECK": "EMULATED_LAUNCH_CHECK",
    "STD_CUDA_CHECK": "EMULATED_CHECK",
    "defined(__CUDA_ARCH__)": "1",
}
_LAUNCH = re.compile(r"(\w+(?:<[\w\s,]+>)?)\s*<<<(.*?)>>>\(([^()]*)\);", re.DOTALL)
_LAUNCH_BOUNDS = re.compile(r"__launch_bounds__\((\w+)\)(\s*)(\w+\([^{]*\)) \{")
_DYNAMIC_SHARED = re.compile(
    r"extern __shared__ (?:__align__\(\d+\) )?unsigned char (\w+)\[\];"
)
_SHARED = re.compile(r"(?<!extern )__shared__ ([\w:<> ]+?) (\w+)((?:\[[^\]]*\])*);")
_GRID_CONSTANT = re.compile(r"const __grid_constant__ ([\w:<>]+) (\w+)")
_NOT_TRANSLATED = re.compile(
    r"__shared__|__grid_constant__|__launch_bounds__|<<<|__constant__|__managed__"
)
_COMMENT = re.compile(r"//.*")
_REGISTRATION = re.compile(r"STABLE_TORCH_LIBRARY_IMPL\(esper, CUDA, m\)")
_OPERATOR = re.compile(r'm\.impl\("([\w.]+)"')


def _launch(match: re.Match[str]) -> str:
    kernel, configuration, arguments = match.groups()
    name = " ".join(kernel.split())
    passed = f"{name}, {arguments}" if arguments.strip() else name
    call = f'emulated::Launch("{name}", EMULATED_HERE, {configuration})({passed});'
    return call + "\n" * (match.group().count("\n") - call.count("\n"))


def _shared(match: re.Match[str]) -> str:
    # A static of a function template is one per instantiation, as shared memory is.
    kind, name, extents = match.groups()
    return (
        f"static const char {name}_key = 0; "
        f'auto& {name} = emulated::shared<{kind}{extents}>(&{name}_key, "{name}", EMULATED_HERE);'
    )


_RULES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (_LAUNCH_BOUNDS, r"\2\3 { emulated::check_launch_bounds(\1, EMULATED_HERE);"),
    (
        _DYNAMIC_SHARED,
        r"unsigned char* \1 = emulated::dynamic_shared_memory(EMULATED_HERE);",
    ),
    (_SHARED, _shared),
    # By reference: a copy for each thread would fill its stack, and nobody may write to it anyway.
    (_GRID_CONSTANT, r"const \1& \2"),
    (_LAUNCH, _launch),
)


def translate(text: str, name: str, namespace: str) -> str:
    """The C++ of one CUDA source or header.

    Args:
        text: the CUDA C++.
        name: the path that compilers and errors are to show.
        namespace: of the torch operators that the file registers, for the CPU, in place of ``esper`` for CUDA.

    Raises:
        ValueError: CUDA syntax remains that no rule covers; the message names the line.
    """
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    for old, new in _RENAMED.items():
        text = text.replace(old, new)
    text = _REGISTRATION.sub(f"STABLE_TORCH_LIBRARY_IMPL({namespace}, CPU, m)", text)
    for number, line in enumerate(text.splitlines(), start=1):
        left = _NOT_TRANSLATED.search(_COMMENT.sub("", line))
        if left:
            raise ValueError(
                f"{name}:{number}: no rule of translate.py covers this use of {left.group()}: {line.strip()}"
            )
    return f'#line 1 "{name}"\n{text}'


def operators(text: str) -> list[str]:
    """Names, with overload, of the operators that a CUDA source registers."""
    return _OPERATOR.findall(text)
