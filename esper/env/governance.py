"""Effects of the governor's decisions on the arrays of an env: rollbacks, cut seeds, snapshots.

The same code governs the hosts of a vector env and the model of an ``esper.Grower``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from esper.attribution.counterfactual import CounterfactualHelper
from esper.env.state import EnvState
from esper.lifecycle import transitions
from esper.lifecycle.slots import MEASUREMENTS, Bools, Slots
from esper.seeds.site import Site
from esper.spaces.action import Op
from esper.training.governor import Governor, Panic
from esper.training.snapshot import Restorable, Snapshot, ValidationRecord


class Governance:
    """Governs the host of row ``row`` of the arrays.

    Args:
        host: rolled back if it goes bad.
        sites: its sites, in the order of the arrays' slots.
        results: the host's last validation.
        governor: decides; None if the host is never rolled back, so that only broken seeds are cut.
    """

    def __init__(
        self,
        row: int,
        host: Restorable,
        sites: Sequence[Site],
        results: CounterfactualHelper,
        governor: Governor | None,
    ) -> None:
        self.row = row
        self.host = host
        self.sites = sites
        self.results = results
        self.governor = governor

    def take_first_snapshot(self, state: EnvState) -> None:
        """Takes the first snapshot, after the first validation."""
        if self.governor is not None:
            self.governor.start_from(float(state.loss[self.row]))
            self._take_snapshot_if_due(self.governor, state)

    def govern(
        self,
        state: EnvState,
        train_loss: float,
        not_finite: float,
        finite: Bools,
    ) -> tuple[Panic, int] | None:
        """Rolls a bad host back; of a healthy one, cuts broken living seeds and takes a snapshot if one is due.

        Args:
            train_loss: mean training loss of the epoch; NaN if it is not known.
            not_finite: number of non-finite values in losses and in what makes up the committed network.
            finite: [S], False for a seed that had a non-finite value.

        Returns:
            The reason of a rollback and the restored epoch.
        """
        row = self.row
        governor = self.governor
        if governor is not None:
            panic = governor.check(float(state.loss[row]), not_finite, train_loss)
            state.anomaly_pending[row] = governor.anomaly_pending
            if panic is not None:
                snapshot = self._roll_back(governor, state)
                return panic, snapshot.epoch

        if not finite.all():
            self._cut(state.slots, ~finite)
        if governor is not None:
            self._take_snapshot_if_due(governor, state)
        return None

    def _cut(self, slots: Slots, broken: Bools) -> None:
        """Removes the living seeds among those that are ``broken`` [S]."""
        gone = np.zeros_like(slots.gate_passed)
        gone[self.row] = slots.living[self.row] & broken
        transitions.cut(slots, gone)
        for s in np.flatnonzero(gone[self.row]).tolist():
            self.host.remove(self.sites[s])

    def _take_snapshot_if_due(self, governor: Governor, state: EnvState) -> None:
        row = self.row
        record = ValidationRecord(
            loss=float(state.committed_loss[row]),
            committed=float(state.committed[row]),
            all_off=float(state.all_off[row]),
            all_off_loss=float(state.all_off_loss[row]),
        )
        # Seeds that are no fossils yet are not part of a snapshot.
        measured = {}
        for s, site in enumerate(self.sites):
            if site.fossil:
                measured[site.name] = {name: getattr(state.slots, name)[row, s].item() for name in MEASUREMENTS}
        fossilized = state.last_op[row] == Op.FOSSILIZE and bool(state.succeeded[row])
        governor.snapshot_if_due(self.host, record, measured, fossilized)

    def _roll_back(self, governor: Governor, state: EnvState) -> Snapshot:
        """Restores a snapshot, and what was measured of the committed network then."""
        row = self.row
        slots = state.slots
        snapshot = governor.roll_back(self.host)
        self.results.reset()  # they are those of the bad network

        record = snapshot.record
        state.accuracy[row] = record.committed
        state.committed[row] = record.committed
        state.loss[row] = record.loss
        state.committed_loss[row] = record.loss
        state.all_off[row] = record.all_off
        state.all_off_loss[row] = record.all_off_loss

        # What the bad epoch measured of a fossil is not true of the restored one.
        for s, site in enumerate(self.sites):
            if site.name not in snapshot.measured:
                continue
            for name, value in snapshot.measured[site.name].items():
                getattr(slots, name)[row, s] = value
            if not math.isnan(slots.contribution[row, s]):
                slots.epochs_since_measured[row, s] += self.host.epoch - snapshot.epoch

        # Seeds that the restored host does not have are gone, also fossils.
        gone = np.zeros_like(slots.gate_passed)
        gone[row] = slots.occupied[row] & [site.seed is None for site in self.sites]
        transitions.revoke(slots, gone)
        state.rolled_back[row] = True
        state.rollbacks[row] = governor.rollbacks
        state.anomaly_pending[row] = False
        return snapshot
