"""Loading the compiled modules, and the messages about missing ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import esper
from esper.ops import _native
from esper.ops._native import Once
from esper.ops.accumulators import Accumulators, accumulate_
from esper.ops.cross_entropy import cross_entropy, cross_entropy_into
from esper.ops.grad_stats import grad_stats
from esper.ops.norm_relu_pool import NormReluPool, norm_relu_pool
from esper.ops.optimizer import SGD, AdamW, FusedOptimizer
from esper.ops.stage_batch import normalisation_table, stage_images, stage_tokens
from esper.ops.tape import Tape

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
    environment = {**os.environ, "PYTHONPATH": str(Path(esper.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
    )


@pytest.mark.slow
def test_a_missing_cpu_module_names_the_repair(tmp_path: Path) -> None:
    _copy_of_package(tmp_path, without="_C")
    done = _import_ops(tmp_path)
    assert done.returncode != 0
    assert (
        "ImportError: Esper's compiled module esper._C is missing in "
        f"{tmp_path / 'esper'}: not built." in done.stderr
    )
    assert _native.REPAIR_COMMAND in done.stderr
    # Python was started there, and another folder on the path is compiled.
    other = Path(esper.__file__).parent
    assert f"; or start Python outside of {tmp_path}, or with -P: {other} is" in (
        done.stderr
    )


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


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


def stepped(kind: type[FusedOptimizer]) -> tuple[Callable[[], object], list[Tensor]]:
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2)
    options = {"momentum": 0.9} if kind is SGD else {}
    optimizer = kind([parameter], lr=0.1, **options)
    optimizer.zero_state()
    return optimizer.step, [parameter, *optimizer.state[parameter].values()]


def written() -> dict[str, tuple[Callable[[], object], list[Tensor]]]:
    """Calls that write into arguments, by operator, with all tensors that they write to."""
    logits, targets = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    stats = cross_entropy(logits, targets).stats
    sums = Accumulators(2, 1, 4)
    measured = grad_stats([[torch.ones(3)]])
    grad_stats([[torch.ones(3)]], out=measured)
    norm = NormReluPool(4)
    image = torch.randn(2, 4, 4, 4).to(memory_format=torch.channels_last)
    images = torch.zeros(4, 4, 4, 1, dtype=torch.uint8)
    table = normalisation_table([0.5], [0.5])
    batch = torch.zeros(2, 1, 4, 4).to(memory_format=torch.channels_last)
    labels = torch.zeros(2, dtype=torch.int64)
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    chosen = torch.arange(2)
    tape = Tape((4, 1, 1))
    tape.add(nn.Linear(4, 2), 0)
    program = tape.program()
    gradient = torch.zeros(2, 4)
    return {
        "accumulate_": (lambda: accumulate_(sums, 0, stats), [sums.block]),
        "cross_entropy_into": (
            lambda: cross_entropy_into(logits, targets, sums, 0, first=0),
            [sums.block, sums.correct],
        ),
        "grad_stats.out": (
            lambda: grad_stats([[torch.ones(3)]], out=measured),
            [measured.fields, measured.norms],
        ),
        "norm_relu_pool_update_": (lambda: norm(image), list(norm.buffers())),
        "stage_images": (
            lambda: stage_images(
                images, chosen, table, targets=targets, out=batch, targets_out=labels
            ),
            [batch, labels],
        ),
        "stage_tokens": (
            lambda: stage_tokens(tokens, chosen, out=tokens),
            [tokens],
        ),
        "sgd_step_": stepped(SGD),
        "adamw_step_": stepped(AdamW),
        "tape_pass_": (
            lambda: program.run(
                torch.ones(2, 4), torch.ones(2, 2, 1, 1), input_gradient=gradient
            ),
            [*program.gradients, gradient],
        ),
    }


@pytest.mark.parametrize("operator", written())
def test_what_an_operator_writes_to_gets_another_version(operator: str) -> None:
    call, tensors = written()[operator]
    before = versions_of(tensors)
    call()
    after = versions_of(tensors)
    assert all(new > old for new, old in zip(after, before, strict=True)), after


def test_autograd_notices_that_an_operator_has_overwritten_a_saved_tensor() -> None:
    weight = torch.ones(1, 1, 4, 4, requires_grad=True)
    batch = torch.zeros(2, 1, 4, 4).to(memory_format=torch.channels_last)
    loss = (weight * batch).sum()
    images = torch.zeros(2, 4, 4, 1, dtype=torch.uint8)
    stage_images(images, torch.arange(2), normalisation_table([0.5], [0.5]), out=batch)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_every_operator_that_writes_raises_versions() -> None:
    """Its only mention is the argument of `writing`."""
    sources = [file.read_text() for file in Path(esper.__file__).parent.rglob("*.py")]
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("esper::"):
            continue
        packet, _, overload = name.removeprefix("esper::").partition(".")
        operator = getattr(getattr(torch.ops.esper, packet), overload or "default")
        writes = [
            argument.alias_info is not None for argument in operator._schema.arguments
        ]
        mention = f"torch.ops.esper.{packet}.{overload or 'default'}"
        for source in sources:
            uses = source.count(mention)
            assert source.count(f"_native.writing({mention})") == uses * any(writes)
            assert not any(writes) or source.count(f"esper.{packet}(") == 0


class Recorder(TorchDispatchMode):
    """Notes a call of each operator, with copies of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Any, Any, Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "esper":
            self.calls.setdefault(str(func), (func, *copied((args, kwargs))))
        return func(*args, **kwargs)


def copied(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), tree)


@pytest.mark.slow
def test_every_operator_that_is_called_alone_keeps_torchs_contract() -> None:
    calls: dict[str, tuple[Any, Any, Any]] = {}
    leaf = torch.randn(4, 3, requires_grad=True)
    functions = [call for call, _ in written().values()]
    functions += [
        partial(function, torch.randn(4, 3)) for function in forward_mode().values()
    ]
    functions.append(lambda: forward_mode()["norm_relu_pool"](leaf).sum().backward())
    functions.append(lambda: forward_mode()["cross_entropy"](leaf).backward())
    for function in functions:
        with Recorder() as recorder:
            function()
        calls |= recorder.calls
    assert len(calls) >= 14
    for name, (operator, arguments, keywords) in calls.items():
        found = torch.library.opcheck(
            operator, arguments, keywords, raise_exception=False
        )
        assert set(found.values()) == {"SUCCESS"}, name


def forward_mode() -> dict[str, Callable[[Tensor], object]]:
    """Functions of a tensor [4, 3] that run operators."""
    targets = torch.tensor([0, 1, 2, 0])
    four = (1, 3, 2, 2)
    one = torch.ones(3)
    sums = Accumulators(1, 1, 4)
    optimizer = SGD([nn.Parameter(torch.ones(2))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)

    def normalised(x: Tensor) -> Tensor:
        image = x.reshape(four).to(memory_format=torch.channels_last)
        return norm_relu_pool(image, one, one)[0]

    return {
        "cross_entropy": lambda x: cross_entropy(x, targets).loss,
        "cross_entropy_into": lambda x: cross_entropy_into(x, targets, sums, 0),
        "norm_relu_pool": normalised,
        "grad_stats": lambda x: grad_stats([[x]]).norm,
        "sgd_step_": lambda x: optimizer.step() or x,
    }


@pytest.mark.parametrize("operator", forward_mode())
def test_operators_refuse_forward_mode(operator: str) -> None:
    function = forward_mode()[operator]
    x = torch.randn(4, 3)
    message = rf"esper::{operator}\S* cannot be differentiated in forward mode"
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(function, (x,), (x,))
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match=message),
    ):
        function(torch.autograd.forward_ad.make_dual(x, x))
    function(x)


def test_gradients_that_can_be_differentiated_are_not_measured_silently() -> None:
    weight = torch.ones(3, requires_grad=True)
    (gradient,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"call it under torch\.no_grad"):
        grad_stats([[gradient]])
    with torch.no_grad():
        norm = grad_stats([[gradient]]).norm.item()
    assert norm == pytest.approx(gradient.norm().item())
