"""A model of what an epoch of hosts costs that are spread over ranks, from five measured numbers.

An epoch of H hosts on R ranks takes, with k = ceil(H / R) hosts on the rank that has most,

    host * k * max(1, R / cores)  +  own * H  +  message * (R - 1)  +  kilobytes * (H - k) / bandwidth

seconds: its hosts train one after the other (``cores``: those of one machine, for ranks of it); rank 0 decides, settles
and logs for all hosts while the others wait; and it sends to every other rank and hears from it. On several machines, a
network's latency is added once an epoch, and its bandwidth holds for all but the hosts of rank 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

TOLERATED = 0.05
"""Share of an epoch that ranks may add."""
NETWORK_MB_PER_S, NETWORK_SECONDS = 1000.0, 2e-4
"""Bandwidth of 10 Gbit/s, less what protocols take, and two ways of 0.1 ms: assumed, not measured."""
CLUSTERS = {"8 GPUs of one machine": (8, 1), "16 machines": (16, 16)}
"""Number of ranks and machines; a GPU is a rank."""
HOSTS_EACH = 4
FACTORS = (1, 10, 100)
"""Seconds that a host trains in an epoch, in units of the measured host."""


@dataclass(frozen=True)
class Costs:
    host: float
    """Seconds that one host trains, is validated and governed in an epoch, on one core or GPU."""
    own: float
    """Seconds in which rank 0 alone works for each host in an epoch."""
    message: float
    """Seconds for a small message to a rank and back."""
    kilobytes: float
    """Sent and received in an epoch for each host of another rank."""
    megabytes_per_second: float

    def added(self, hosts: int, ranks: int, machines: int = 1) -> float:
        """Seconds of an epoch that ranks add to the training of hosts: rank 0's own work and the exchange."""
        speed = self.megabytes_per_second if machines == 1 else NETWORK_MB_PER_S
        latency = NETWORK_SECONDS if machines > 1 else 0.0
        away = hosts - math.ceil(hosts / ranks)
        exchange = (
            self.message * (ranks - 1) + latency + self.kilobytes * away / 1000 / speed
        )
        return self.own * hosts + exchange * (ranks > 1)

    def epoch(self, hosts: int, ranks: int, cores: int, machines: int = 1) -> float:
        """Seconds of an epoch."""
        crowd = max(1.0, ranks / machines / cores)
        return self.host * math.ceil(hosts / ranks) * crowd + self.added(
            hosts, ranks, machines
        )

    def most_ranks(self, each: int, machines: int) -> int:
        """Number of ranks with ``each`` hosts from which on the others wait for rank 0 longer than is tolerated."""
        ranks = 1
        while (
            ranks < 10_000
            and self.added(each * (ranks + 1), ranks + 1, machines)
            <= TOLERATED * self.host * each
        ):
            ranks += 1
        return ranks


def markdown(
    costs: Costs, measured: dict[int, float], hosts: int, cores: int
) -> list[str]:
    """Tables of the model: its values, an epoch of the ``measured`` seconds beside it, and what it predicts.

    ``measured`` is by number of ranks, on a machine with ``cores``.
    """
    lines = [
        *(
            "",
            "| host, ms | rank 0's own work, ms a host | message, ms | kB a host | MB/s |",
            "|---|---|---|---|---|",
        ),
        f"| {1000 * costs.host:.1f} | {1000 * costs.own:.3f} | {1000 * costs.message:.2f} | {costs.kilobytes:.2f} | "
        f"{costs.megabytes_per_second:.0f} |",
        *(
            "",
            f"| ranks on {cores} cores | epoch of {hosts} hosts, s | model, s |",
            "|---|---|---|",
        ),
        *(
            f"| {r} | {seconds:.2f} | {costs.epoch(hosts, r, cores):.2f} |"
            for r, seconds in measured.items()
        ),
        *(
            "",
            f"| {HOSTS_EACH} hosts each on | host, s | an epoch's share of training | 5 % are added from |",
        ),
        "|---|---|---|---|",
    ]
    for name, (ranks, machines) in CLUSTERS.items():
        for factor in FACTORS:
            slower = replace(costs, host=costs.host * factor)
            share = (
                slower.host
                * HOSTS_EACH
                / slower.epoch(HOSTS_EACH * ranks, ranks, ranks, machines)
            )
            most = slower.most_ranks(HOSTS_EACH, machines)
            lines.append(
                f"| {name} | {slower.host:.2f} | {100 * share:.1f} % | {most + 1} ranks on |"
            )
    return lines
