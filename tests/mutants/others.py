"""Faults in runs, comparisons and numbers that no row names."""

from __future__ import annotations

from tests.fault import Fault

MUTANTS: dict[str, list[Fault]] = {
    "runs and comparisons": [
        Fault(
            "`uniform` takes the blueprint farthest from the grown size",
            "benchmarks/alternatives.py",
            "row, name = min(sizes, key=",
            "row, name = max(sizes, key=",
            "tests/benchmarks/test_alternatives.py::test_uniform_has_the_blueprint_and_the_row_of_the_nearest_size",
        ),
        Fault(
            "copies of a unit all have its outgoing weights in full",
            "benchmarks/alternatives.py",
            "shared = torch.bincount(inputs, minlength=_inputs_of(old))[inputs]",
            "shared = torch.ones_like(inputs)",
            "tests/benchmarks/test_alternatives.py::test_a_wide_host_computes_what_the_narrow_one_does",
        ),
        Fault(
            "a pupil learns nothing from its teacher",
            "benchmarks/alternatives.py",
            "share * from_teacher",
            "0 * from_teacher",
            "tests/benchmarks/test_alternatives.py::test_a_pupil_has_the_gradient_of_the_loss_of_distillation",
        ),
        Fault(
            "an ensemble is the learner alone",
            "benchmarks/alternatives.py",
            "return both.logsumexp(0) - math.log(2)",
            "return both[0]",
            "tests/benchmarks/test_alternatives.py::test_an_ensemble_averages_the_probabilities_of_both",
        ),
        Fault(
            "a control trains for another compute",
            "esper/compare/controls.py",
            "round((flops - validation) / an_epoch)",
            "round(2 * flops / an_epoch)",
            "tests/benchmarks/test_alternatives.py::test_from_new_weights_each_computes_as_much_as_the_grown_host",
        ),
        Fault(
            "a run of another config plays as an arm",
            "esper/compare/comparison_run.py",
            "        _check_config(folder, arm.config)\n",
            "",
            "tests/compare/test_seed_comparison.py::test_a_run_of_another_config_does_not_play_as_an_arm",
        ),
        Fault(
            "a run that is finished elsewhere is trained again",
            "esper/compare/comparison_run.py",
            "        if not checkpoint.files(folder):\n",
            "        if True:\n",
            "tests/compare/test_seed_comparison.py::test_runs_that_other_machines_have_finished_play_as_they_are",
        ),
        Fault(
            "agents are chosen on hosts that they learned from",
            "esper/run/agents.py",
            "VALIDATION = 7 * 2**29",
            "VALIDATION = 0",
            "tests/run/test_learning_run.py::test_hosts_that_agents_learn_from_are_validated_on_and_com"
            "pared_on_have_seeds_that_are_far_apart",
        ),
        Fault(
            "two runs share a folder",
            "esper/files/claim.py",
            "        fcntl.flock(lock.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
            "        fcntl.flock(lock.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)",
            "tests/files/test_claim.py::test_another_process_is_refused_until_the_owner_is_done",
        ),
        Fault(
            "a write that fails leaves a part",
            "esper/files/atomic.py",
            "                part.unlink()\n",
            "                part.exists()\n",
            "tests/files/test_atomic.py::test_a_write_that_fails_leaves_the_old_file_and_no_part",
        ),
        Fault(
            "a resumed comparison follows the file of today",
            "esper/compare/folder.py",
            "return arm.controller if copy is None else arm.spec.following(copy)",
            "return arm.controller",
            "tests/compare/test_comparison_run.py::test_a_comparison_follows_what_it_began_with_from_anywhere[schedule]",
        ),
        Fault(
            "a quota of the process's own group counts alone",
            "esper/training/execution/cores.py",
            "(mount / part for part in (place, *place.parents))",
            "(mount / part for part in (place,))",
            "tests/training/execution/test_cores.py::test_the_smallest_quota_above_the_process_counts",
        ),
    ],
    "numbers": [
        Fault(
            "advantages are not discounted",
            "esper/agents/ppo/buffer.py",
            "following = delta + decays[t] * torch",
            "following = delta + lam * torch",
            "tests/agents/ppo/test_buffer.py::test_equals_the_reference",
        ),
        Fault(
            "the ratio is clipped on one side",
            "esper/agents/ppo/update.py",
            "ratio.clamp(1 - config.clip, 1 + config.clip)",
            "ratio.clamp(max=1 + config.clip)",
            "tests/agents/ppo/test_update.py::test_clipped_objective",
        ),
        Fault(
            "an interval is that of the normal distribution",
            "esper/compare/statistics.py",
            "quantile * math.sqrt(n / (n - 1))",
            "scipy.stats.norm.ppf((1 - level) / 2)",
            "tests/compare/test_statistics.py::test_interval_matches_the_enumerated_bootstrap",
        ),
        Fault(
            "an interaction leaves out the network without both",
            "esper/training/counterfactual.py",
            "total += joint - mine - its + none",
            "total += joint - mine - its",
            "tests/training/test_counterfactual.py::test_interactions_by_hand",
        ),
        Fault(
            "actions are rounded",
            "esper/core/action.py",
            '    if array.dtype.kind in "iu":\n',
            '    if array.dtype.kind in "biu":\n',
            "tests/core/test_action.py::test_what_is_no_integer_is_refused_and_not_rounded",
        ),
        Fault(
            "a rule's action is spread over all heads",
            "esper/agents/controller.py",
            "                if action.shape != shape:\n",
            "                if False:\n",
            "tests/agents/test_own_controller.py::test_a_rule_that_chooses_no_action_is_refused",
        ),
        Fault(
            "equal differences have a p value of 0",
            "esper/compare/statistics.py",
            "    return max(SMALLEST_P, float(2",
            "    return max(0.0, float(2",
            "tests/compare/test_statistics.py::test_no_p_value_is_zero_however_large_the_difference",
        ),
        Fault(
            "rent is not divided by the horizon",
            "esper/core/reward_terms.py",
            "rent_rate(t.after.weighted_share, config) / t.horizon",
            "rent_rate(t.after.weighted_share, config)",
            "tests/env/test_reward_observed.py::test_rewards_of_planted_follow_from_what_is_observed",
        ),
    ],
    "the tuned baseline": [
        Fault(
            "it trains half its steps",
            "esper/bench/baselines.py",
            "return len(self.y) // self.batch",
            "return len(self.y) // self.batch // 2",
            "tests/bench/test_baselines.py::test_an_epoch_trains_each_host_on_every_sample_once",
        ),
        Fault(
            "all batches are the first one",
            "esper/bench/baselines.py",
            "total += self.step(number, rows)",
            "total += self.step(number, self.order(1)[0])",
            "tests/bench/test_baselines.py::test_an_epoch_trains_each_host_on_every_sample_once",
        ),
        Fault(
            "its rate counts samples that it does not train on",
            "esper/bench/baselines.py",
            "losses = [self.train(number, steps) for number in range(len(self.hosts))]",
            "losses = [self.train(0, steps)]",
            "tests/bench/test_training.py::test_baselines_train_on_the_samples_that_their_rates_count",
        ),
        Fault(
            "its weights do not change",
            "esper/bench/baselines.py",
            "        optimizer.step()\n",
            "",
            "tests/bench/test_baselines.py::test_hosts_learn_in_each_variant",
        ),
        Fault(
            "the slowest variant is taken",
            "esper/bench/baselines.py",
            "return min(seconds, key=seconds.__getitem__)",
            "return max(seconds, key=seconds.__getitem__)",
            "tests/bench/test_baselines.py::test_the_fastest_variant_is_taken_and_named",
        ),
    ],
    "warnings": [
        Fault(
            "warnings of different heads are counted as one",
            "esper/show/view.py",
            "            found[event.kind, event.head].append(event)",
            "            found[event.kind, None].append(event)",
            "tests/show/test_sections.py::test_a_warning_of_a_head_is_shown_once_with_its_newest_finding",
        ),
    ],
}
