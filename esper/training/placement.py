"""Which copies of hosts lie beside the hosts on a GPU, and which in pinned CPU memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import Enum

from esper.config import RunConfig
from esper.training.contents import network_tensors
from esper.training.host_training import HostTraining

MIB = 2**20


class HostCopy(Enum):
    """A copy that is kept of each host, in the order in which copies move to pinned memory."""

    OLDER = "older snapshots"
    EPOCH_START = "starts of epochs"
    NEWEST = "newest snapshots"


def pinned_copies(
    copy_bytes: int, hosts: int, limit_mib: float | None, kept: Sequence[HostCopy] = tuple(HostCopy)
) -> tuple[HostCopy, ...]:
    """The copies that go to pinned memory so that the others take at most ``limit_mib`` MiB of one device.

    Args:
        copy_bytes: size of one copy of one host, bytes.
        hosts: on the device.
        limit_mib: None for no limit.
        kept: the copies there are, the first to go first.
    """
    pinned = 0
    while limit_mib is not None and (len(kept) - pinned) * hosts * copy_bytes > limit_mib * MIB:
        pinned += 1
    return tuple(kept[:pinned])


def copies_to_pin(
    run: RunConfig,
    envs: Sequence[HostTraining],
    seed_parameters: int = 0,
    kept: Sequence[HostCopy] = tuple(HostCopy),
) -> tuple[HostCopy, ...]:
    """The copies of ``envs`` that go to pinned memory under ``run.max_device_copies_mib``; none on a CPU.

    A copy is taken to be as large as the host with its buffers and momentum, and ``seed_parameters`` float32 parameters
    of seeds with theirs. Of several devices the one with most hosts decides for all.
    """
    if run.max_device_copies_mib is None or envs[0].device.type != "cuda":
        return ()
    largest = max(sum(tensor.nbytes for _, tensor in network_tensors(env, ())) for env in envs)
    hosts = max(Counter(env.device for env in envs).values())
    return pinned_copies(largest + 2 * 4 * seed_parameters, hosts, run.max_device_copies_mib, kept)
