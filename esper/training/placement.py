"""The memory of snapshots: beside the hosts on a GPU, or pinned CPU memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from esper.config import RunConfig
from esper.ops.adamw import AdamW
from esper.training.host_training import HostTraining

MIB = 2**20


COPIES = ("older snapshots", "newest snapshots")
"""The copies kept of each host, in the order in which they move to pinned memory."""


def copies_to_pin(
    run: RunConfig,
    hosts: Sequence[HostTraining],
    seed_parameters: int = 0,
) -> int:
    """Returns the number of ``COPIES`` that move to pinned memory, so that the others of any one GPU fit
    ``run.max_device_copies_mib``; 0 on a CPU.

    The estimated size of a copy is that of the host with its buffers and its optimizer's state, and of
    ``seed_parameters`` float32 parameters of seeds with theirs. The device with the most hosts decides for all.
    """
    if run.max_device_copies_mib is None or hosts[0].device.type != "cuda":
        return 0
    host_bytes = max(map(bytes_of, hosts))
    count = max(Counter(training.device for training in hosts).values())
    # A float32 parameter of a seed takes 4 bytes, and each of its moments as many.
    moments = 2 if isinstance(hosts[0].host_group.optimizer, AdamW) else 1
    seed_bytes = (1 + moments) * 4 * seed_parameters
    return pinned_copies(host_bytes + seed_bytes, count, run.max_device_copies_mib)


def bytes_of(training: HostTraining) -> int:
    """The size of a host with its buffers and its optimizer's state."""
    return sum(tensor.nbytes for _, tensor in training.network_tensors(()))


def pinned_copies(copy_bytes: int, hosts: int, limit_mib: float) -> int:
    """Returns the number of copies to move, so that the others of ``hosts`` hosts take at most ``limit_mib`` MiB.

    ``copy_bytes`` is the size of one copy of one host.
    """
    if not copy_bytes:
        return 0
    fitting = int(limit_mib * MIB // (hosts * copy_bytes))
    return max(len(COPIES) - fitting, 0)
