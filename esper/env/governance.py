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
from esper.lifecycle.slots import MEASUREMENTS, Bools
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
        self.row, self.host, self.sites = row, host, sites
        self.results, self.governor = results, governor

    def take_first_snapshot(self, state: EnvState) -> None:
        """Takes the first snapshot, after the first validation."""
        if self.governor is not None:
            self.governor.start_from(float(state.loss[self.row]))
            self._take_snapshot_if_due(self.governor, state)

    def govern(self, state: EnvState, train_loss: float, not_finite: float, finite: Bools) -> tuple[Panic, int] | None:
        """Rolls a bad host back; of a healthy one, cuts broken living seeds and takes a snapshot if one is due.

        Args:
            train_loss: mean training loss of the epoch; NaN if it is not known.
            not_finite: number of non-finite values in losses and in what makes up the committed network.
            finite: [S], False for a seed that had a non-finite value.

        Returns:
            The reason of a rollback and the restored epoch.
        """
        row, slots, governor = self.row, state.slots, self.governor
        gone = np.zeros_like(slots.gate_passed)
        if governor is not None:
            panic = governor.check(float(state.loss[row]), not_finite, train_loss)
            state.anomaly_pending[row] = governor.anomaly_pending
            if panic is not None:
                snapshot = self._roll_back(governor, state)
                gone[row] = slots.occupied[row] & [site.seed is None for site in self.sites]
                transitions.revoke(slots, gone)
                state.rolled_back[row], state.rollbacks[row] = True, governor.rollbacks
                state.anomaly_pending[row] = False
                return panic, snapshot.epoch
        if not finite.all():
            gone[row] = slots.living[row] & ~finite
            transitions.cut(slots, gone)
            for s in np.flatnonzero(gone[row]).tolist():
                self.host.remove(self.sites[s])
        if governor is not None:
            self._take_snapshot_if_due(governor, state)
        return None

    def _take_snapshot_if_due(self, governor: Governor, state: EnvState) -> None:
        row, slots = self.row, state.slots
        recorded = (state.committed_loss, state.committed, state.all_off, state.all_off_loss)
        measured = {
            site.name: {name: getattr(slots, name)[row, s].item() for name in MEASUREMENTS}
            for s, site in enumerate(self.sites)
            if site.fossil
        }
        fossilized = state.last_op[row] == Op.FOSSILIZE and bool(state.succeeded[row])
        record = ValidationRecord(*(float(values[row]) for values in recorded))
        governor.snapshot_if_due(self.host, record, measured, fossilized)

    def _roll_back(self, governor: Governor, state: EnvState) -> Snapshot:
        """Restores a snapshot, and what was measured of the committed network then."""
        row, slots, snapshot = self.row, state.slots, governor.roll_back(self.host)
        self.results.reset()  # they are those of the bad network
        record = snapshot.record
        state.accuracy[row] = state.committed[row] = record.committed
        state.loss[row] = state.committed_loss[row] = record.loss
        state.all_off[row], state.all_off_loss[row] = record.all_off, record.all_off_loss
        # What the bad epoch measured of a fossil is not true of the restored one.
        for s, site in enumerate(self.sites):
            for name, value in snapshot.measured.get(site.name, {}).items():
                getattr(slots, name)[row, s] = value
            if site.name in snapshot.measured and not math.isnan(slots.contribution[row, s]):
                slots.epochs_since_measured[row, s] += self.host.epoch - snapshot.epoch
        return snapshot
