"""Statistics of groups of gradients in one pass: norms, counts, health and the clip coefficient."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from esper.ops import _native

VANISHING_NORM = 1e-7
"""L2 norm below which a gradient vanishes, near float32's epsilon; compiled into the kernels (csrc/grad_stats.h)."""
# Columns of `GradStats.fields`, in the order of csrc/grad_stats.h.
FIELDS = (
    "sum_sq",
    "norm",
    "tensors",
    "elements",
    "min_norm",
    "max_norm",
    "vanishing",
    "exploding",
    "nan",
    "inf",
    "zero",
    "health",
    "clip_coef",
)

# Layout of the CUDA kernel's scratch memory, as in csrc/cuda/grad_stats.cu: one row for the counter, one per tensor,
# and one per chunk of a tensor.
_CHUNK = 8192
_SCRATCH_COLUMNS = 6
_SCRATCH_DEVICE = "cuda"

_native.not_differentiable("grad_stats")
_native.not_differentiable("grad_stats.out", in_place=True)

_functional = torch.ops.esper.grad_stats.default
_into = _native.writing(torch.ops.esper.grad_stats.out)


class GradStats:
    """Results of :func:`grad_stats`. All values stay on the gradients' device; reading one on the CPU waits for a GPU.

    Attributes:
        fields: float64 ``[G, 13]``, one row per group, columns named by ``FIELDS``.
        norms: float64 ``[N]``, L2 norm of each gradient, all groups in order, without None.

    Every field is also an attribute, a float64 ``[G]`` view:

    ============= =====================================================================================================
    ``sum_sq``    sum of squares of all elements
    ``norm``      its square root, the global L2 norm of the group
    ``tensors``   gradients with at least one element
    ``elements``  number of elements of these gradients
    ``min_norm``  smallest L2 norm of one gradient; NaN if one is NaN; 0 without gradients
    ``max_norm``  largest L2 norm of one gradient, likewise
    ``vanishing`` gradients with norm < ``VANISHING_NORM``, 1e-7
    ``exploding`` gradients with norm > ``exploding_norm`` or not finite
    ``nan``       NaN elements
    ``inf``       infinite elements
    ``zero``      elements equal to zero
    ``health``    ``clamp(1 - 0.5 * vanishing / tensors - 0.8 * exploding / tensors, 0, 1)``; 0 if ``norm`` is not
                  finite, or for a group without gradients, which must not pass a gate
    ``clip_coef`` ``min(1, max_norm / (norm + 1e-6))`` as in ``torch.nn.utils.clip_grads_with_norm_``; 0 if ``norm`` is
                  not finite, and only then, so that a step reads 0 as "skip"
    ============= =====================================================================================================
    """

    __slots__ = ("_scratch", "fields", "norms")

    def __init__(self, fields: Tensor, norms: Tensor) -> None:
        self.fields = fields  # [G, 13]
        self.norms = norms  # [N]
        self._scratch: Tensor | None = None  # [R, 6] for the CUDA kernel, allocated at the first use as `out`

    def __getattr__(self, name: str) -> Tensor:
        if name not in FIELDS:
            raise AttributeError(f"GradStats has no attribute {name!r}; fields: {', '.join(FIELDS)}")
        return self.fields[:, FIELDS.index(name)]


def grad_stats(
    groups: Iterable[Iterable[Tensor | None]],
    max_norm: float = 1.0,
    exploding_norm: float = 10.0,
    out: GradStats | None = None,
    device: torch.device | str | None = None,
) -> GradStats:
    """Measures groups of gradients in one pass, without waiting for a GPU.

    Sums have float64 range for every dtype and are bit-identical for any number of threads.

    Args:
        groups: for each group (a host, a seed) its gradients: float32, bfloat16, float16 or float64 of any shape and
            strides, all on one device. None is skipped. Iterators are allowed; each is read once.
        max_norm: norm to which ``clip_coef`` clips; positive, ``inf`` for no clipping.
        exploding_norm: a gradient with a larger norm counts as exploding; positive.
        out: result of an earlier call with the same number of groups and gradients; it is overwritten and returned.
            Nothing is allocated unless a gradient has holes or repeats (an expanded or sliced view), which is copied
            first. On CUDA its first use also allocates scratch memory, so use it once before capturing a graph. Two
            streams or threads must not write the same ``out`` at the same time.
        device: device of the result if there are no gradients; None for the CPU.

    Raises:
        RuntimeError: an unsupported dtype, gradients on several devices, a bound that is not positive, or an ``out`` of
            other sizes.
        NotImplementedError: gradients that can be differentiated themselves, except under ``torch.no_grad()``.
    """
    gradients = []
    sizes = []
    for group in groups:
        present = [gradient for gradient in group if gradient is not None]
        gradients.extend(present)
        sizes.append(len(present))

    _native.refuse_forward_mode("esper::grad_stats")
    if torch.is_grad_enabled() and any(gradient.requires_grad for gradient in gradients):
        raise NotImplementedError(
            "grad_stats cannot be differentiated, and these gradients can (create_graph=True): call it under "
            "torch.no_grad() to measure them, or use torch.linalg.vector_norm"
        )
    if out is None:
        if gradients:
            fields, norms = _functional(gradients, sizes, max_norm, exploding_norm)
            return GradStats(fields, norms)
        # Without gradients, the device of the output decides the dispatch.
        fields = torch.empty(len(sizes), len(FIELDS), dtype=torch.float64, device=device)
        out = GradStats(fields, fields.new_empty(0))
    if out._scratch is None:
        out._scratch = _new_scratch(gradients, out.fields.device)
    _into(
        gradients,
        sizes,
        max_norm,
        exploding_norm,
        fields=out.fields,
        norms=out.norms,
        scratch=out._scratch,
    )
    return out


def _new_scratch(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Zeroed scratch memory for these gradients, float64 ``[R, 6]``; without rows where no kernel uses it."""
    rows = 0
    if device.type == _SCRATCH_DEVICE:
        rows = 1 + len(gradients)
        for gradient in gradients:
            rows += -(-gradient.numel() // _CHUNK)  # rounded up
    return torch.zeros(rows, _SCRATCH_COLUMNS, dtype=torch.float64, device=device)


@torch.library.register_fake("esper::grad_stats")  # type: ignore[untyped-decorator]
def _fake(
    gradients: Sequence[Tensor],
    group_sizes: Sequence[int],
    max_norm: float,
    exploding_norm: float,
) -> tuple[Tensor, Tensor]:
    fields = gradients[0].new_empty((len(group_sizes), len(FIELDS)), dtype=torch.float64)
    norms = fields.new_empty((len(gradients),))
    return fields, norms
