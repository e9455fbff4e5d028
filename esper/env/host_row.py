"""One host's row in the arrays of envs: its measurements, the roles of its seeds, and what the governor changes.

The hosts of a vector env and the model of an ``esper.Grower`` share this code; every measured number is defined here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from esper.config import GateConfig
from esper.core import transitions
from esper.core.site import Role, Site
from esper.core.slots import GROWN, MEASUREMENTS, Bools, Slots
from esper.core.stage import SeedStage
from esper.core.state import EnvState
from esper.training.counterfactual import ALL_OFF, CounterfactualHelper
from esper.training.governor import Governor, Panic
from esper.training.metrics import HOST, GradientSummary
from esper.training.snapshot import Restorable, Snapshot, ValidationRecord


def record_validation(
    state: EnvState,
    row: int,
    results: CounterfactualHelper,
) -> None:
    """Writes accuracy (pp) and loss of the three networks that an epoch validates; NaN for one that is not."""
    for accuracy, loss, network in (
        (state.accuracy, state.loss, results.all_on),
        (state.committed, state.committed_loss, results.committed),
        (state.all_off, state.all_off_loss, ALL_OFF),
    ):
        if results.measured(network):
            accuracy[row] = results.accuracy(network)
            loss[row] = results.loss_of(network)
        else:
            accuracy[row] = math.nan
            loss[row] = math.nan


def record_seeds(
    state: EnvState,
    row: int,
    names: Sequence[str],
    results: CounterfactualHelper,
    summaries: Mapping[str, GradientSummary],
    config: GateConfig,
) -> None:
    """Writes what was measured of the seeds in slots ``names``, in the order of the arrays, and the host's gradients.

    ``summaries`` are those of the epoch's gradients, by slot and ``HOST``.
    """
    slots = state.slots
    host = summaries.get(HOST)
    if host is not None:
        state.gradient_norm[row] = host.norm
        state.gradient_health[row] = host.health_by(config.vanishing_weight, config.exploding_weight)
        state.vanishing[row] = host.vanishing
        state.exploding[row] = host.exploding
    for s, name in enumerate(names):
        seed = summaries.get(name)
        if seed is not None and host is not None:
            _record_gradients(slots, (row, s), seed, host, config)
        _record_contribution(slots, (row, s), name, results)


def _record_gradients(
    slots: Slots,
    at: tuple[int, int],
    seed: GradientSummary,
    host: GradientSummary,
    config: GateConfig,
) -> None:
    ratio = seed.ratio_to(host)
    if math.isfinite(ratio):
        decay = config.gradient_ratio_decay
        before = float(slots.gradient_ratio[at])
        # An exponential moving average, which begins with the first ratio.
        if not math.isnan(before):
            ratio = decay * before + (1 - decay) * ratio
        slots.gradient_ratio[at] = ratio
    slots.gradient_norm[at] = seed.norm
    slots.gradient_health[at] = seed.health_by(config.vanishing_weight, config.exploding_weight)
    slots.vanishing[at] = seed.vanishing
    slots.exploding[at] = seed.exploding


def _record_contribution(
    slots: Slots,
    at: tuple[int, int],
    name: str,
    results: CounterfactualHelper,
) -> None:
    trial = results.trial_of(name)
    if trial is not None:
        slots.trial[at] = trial.difference
        slots.trial_error[at] = trial.error

    contribution = results.contribution(name)
    before = float(slots.contribution[at])
    if not math.isnan(before):
        slots.epochs_since_measured[at] += 1
    if contribution is not None:
        # The first contribution is a change from 0.
        change = contribution.difference
        if not math.isnan(before):
            change -= before
        slots.contribution_change[at] = change
        slots.contribution[at] = contribution.difference
        slots.contribution_error[at] = contribution.error
        slots.epochs_since_measured[at] = 0
    elif results.lean:  # nothing measures it again, and an old number would be taken for the present one
        slots.contribution[at] = math.nan
        slots.contribution_error[at] = math.nan
        slots.contribution_change[at] = 0
        slots.epochs_since_measured[at] = 0

    interaction = results.interaction(name)
    if interaction is not None:
        slots.interaction[at] = interaction
    elif results.lean:
        slots.interaction[at] = math.nan


def role_of(stage: int, alpha: float) -> Role:
    """Returns the role of a seed in this stage."""
    if stage == SeedStage.TRAINING:
        return Role.INCUBATING
    if stage == SeedStage.FOSSILIZED:
        return Role.FOSSIL
    if stage in (SeedStage.BLENDING, SeedStage.HOLDING) and alpha > 0:
        return Role.BLENDED
    return Role.ABSENT


def assign_roles(
    host: Restorable,
    sites: Sequence[Site],
    slots: Slots,
    row: int,
) -> None:
    """Gives the seed of each of ``sites``, in the order of the arrays' slots, the role, alphas and learning flag that
    follow from the lifecycle in ``row``."""
    stages = slots.stage[row].tolist()
    alphas = slots.alpha[row].tolist()
    targets = slots.incubation_target[row].tolist()
    learning = slots.learning[row].tolist()
    for s, site in enumerate(sites):
        if site.seed is not None:
            role = role_of(stages[s], alphas[s])
            host.assign(site, role, alphas[s], targets[s], learning[s])


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

    def rebase(self, state: EnvState) -> None:
        """Makes the present host that of all snapshots, after a merge."""
        if self.governor is not None:
            self.governor.rebase(self.host, *self._present(state))

    def _take_snapshot_if_due(self, governor: Governor, state: EnvState) -> None:
        row = self.row
        slots = state.slots
        # Clocks have not moved yet. A seed that was kept when it was planted has no age.
        fossilized = slots.fossil[row] & (slots.epochs_in_stage[row] == 0) & (slots.age[row] > 0)
        if governor.snapshot_due(self.host.epoch, bool(fossilized.any())):
            governor.take_snapshot(self.host, *self._present(state))

    def _present(
        self,
        state: EnvState,
    ) -> tuple[ValidationRecord, dict[str, dict[str, float]], dict[str, list[float]]]:
        """Returns the last validation, the measurements of each fossil, and what slots have grown."""
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
        grown = {name: getattr(state.slots, name)[row].tolist() for name in GROWN}
        return record, measured, grown

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
        for name, values in snapshot.grown.items():  # layers have shrunk since
            getattr(slots, name)[row] = values
        state.rolled_back[row] = True
        state.rollbacks[row] = governor.rollbacks
        state.anomaly_pending[row] = False
        return snapshot
