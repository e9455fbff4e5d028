"""All mutants, by the row of docs/dev/proofs.md whose proof they try."""

from __future__ import annotations

from tests.fault import Fault
from tests.mutants import (
    contracts,
    findings_c_to_h,
    findings_l_to_t,
    findings_m,
    growing,
    layers,
    networks,
    others,
    own_loops,
    tape,
    training,
    traps_body,
    traps_machine,
)

MUTANTS: dict[str, list[Fault]] = {
    **findings_c_to_h.MUTANTS,
    **findings_m.MUTANTS,
    **findings_l_to_t.MUTANTS,
    **traps_body.MUTANTS,
    **traps_machine.MUTANTS,
    **networks.MUTANTS,
    **growing.MUTANTS,
    **own_loops.MUTANTS,
    **layers.MUTANTS,
    **others.MUTANTS,
    **tape.MUTANTS,
    **training.MUTANTS,
    **contracts.MUTANTS,
}
