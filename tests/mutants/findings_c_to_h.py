"""Mutants for rows C and H of the findings."""

from __future__ import annotations

from tests.fault import Fault

MUTANTS: dict[str, list[Fault]] = {
    "C1": [
        Fault(
            "the first host's row of sums is added to by all",
            "esper/training/metrics.py",
            "accumulate_(self.accumulators, self.place, stats)",
            "accumulate_(self.accumulators, 0, stats)",
            "tests/training/test_validate.py::test_a_row_changes_when_its_host_runs_and_at_no_other_time",
        ),
    ],
    "C2": [
        Fault(
            "the loss is summed by another thread",
            "esper/training/step.py",
            "    training.totals.add_training(sums)\n",
            "    from threading import Thread\n\n    Thread(target=training.totals.add_training, args=(su"
            "ms,)).start()\n",
            "tests/training/execution/test_one_thread.py::test_loss_statistics_totals_and_step_of_a_bat"
            "ch_are_made_by_the_worker_of_its_env",
        ),
    ],
    "C3": [
        Fault(
            "the rollout stores log-probabilities of raw observations",
            "esper/agents/ppo/agent.py",
            "observation=seen,",
            "observation=raw,",
            "tests/agents/ppo/test_agent.py::test_replay_reproduces_log_probabilities",
        ),
    ],
    "C4": [
        Fault(
            "each snapshot lies in new memory",
            "esper/training/snapshot.py",
            "                if copy is None or copy.shape",
            "                if copy is not None or copy.shape",
            "tests/training/test_snapshot.py::test_snapshots_live_in_the_same_storage_in_every_episode",
        ),
    ],
    "H1": [
        Fault(
            "a panic rolls back every host",
            "esper/env/host_row.py",
            "state.rolled_back[row] = True",
            "state.rolled_back[:] = True",
            "tests/env/test_faults.py::"
            "test_a_fault_that_is_not_finite_costs_one_rollback_and_touches_one_env[NaN weight-fossil]",
        ),
    ],
    "H2": [
        Fault(
            "a host that draws random numbers is compiled",
            "esper/training/execution/compiled.py",
            "    if draws or has_dropout(host):",
            "    if draws:",
            "tests/training/execution/test_compiled.py::test_grafted_hosts_and_hosts_that_draw_have_a_reason",
        ),
    ],
    "H3": [
        Fault(
            "float32 has a loss scale",
            "esper/training/precision.py",
            'if self.precision == "float16" else None\n',
            'if self.precision != "bfloat16" else None\n',
            "tests/training/test_float16.py::test_other_formats_have_no_scale",
        ),
    ],
    "H4": [
        Fault(
            "statistics of observations change within a round",
            "esper/agents/ppo/policy.py",
            "        seen = self.observations.normalize(raw)\n",
            "        self.observations.update(raw)\n        seen = self.observations.normalize(raw)\n",
            "tests/agents/ppo/test_agent.py::test_statistics_are_frozen_within_a_round_and_updated_once_after_it",
        ),
    ],
    "H5": [
        Fault(
            "alphas of counterfactuals are those of the first configuration",
            "esper/training/validate.py",
            "    alphas = training.tried[: len(configurations)]",
            "    alphas = training.tried[:1].expand(len(configurations), -1)",
            "tests/training/test_counterfactual.py::test_one_pass_gives_the_results_of_a_pass_per_configuration",
        ),
    ],
    "H6": [
        Fault(
            "an unknown blueprint is an error without the known ones",
            "esper/core/blueprints/registry.py",
            "known = [other.name for other in self._of(topology)]",
            'known = ["some"]',
            "tests/core/blueprints/test_registry.py::test_an_unknown_blueprint_lists_the_known_ones",
        ),
    ],
    "H7": [
        Fault(
            "momentum starts anew with each assignment of a stage",
            "esper/training/host_training.py",
            "        site.assign(role, alpha, target, learning)\n",
            "        site.assign(role, alpha, target, learning)\n        self.seed_groups[site.name].opt"
            "imizer.zero_state()\n",
            "tests/env/test_lifecycle.py::test_momentum_lives_through_every_stage",
        ),
        Fault(
            "a snapshot forgets momentum",
            "esper/training/host_training.py",
            "                    if value is not None:\n                        yield",
            "                    if value is None:\n                        yield",
            "tests/training/test_snapshot.py::test_momentum_of_a_fossil_lives_through_a_rollback",
        ),
    ],
}
