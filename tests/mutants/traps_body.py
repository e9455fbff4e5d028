"""Mutants for the traps of body and mind."""

from __future__ import annotations

from tests.fault import Fault

MUTANTS: dict[str, list[Fault]] = {
    "trap 1": [
        Fault(
            "a seed at alpha 1 cuts the host's gradient",
            "esper/training/step.py",
            "            delta = delta_of(site, at, track_finite",
            "            at = at.each(Tensor.detach)\n            delta = delta_of(site, at, track_finite",
            "tests/training/test_incubation.py::test_the_hosts_gradient_lives_at_alpha_one",
        ),
        Fault(
            "earlier seeds get no gradient through later ones",
            "esper/training/step.py",
            "            delta = delta_of(site, at, track_finite",
            "            at = at.each(Tensor.detach)\n            delta = delta_of(site, at, track_finite",
            "tests/training/test_incubation.py::test_earlier_seeds_learn_through_later_ones",
        ),
    ],
    "trap 2": [
        Fault(
            "a loss that is not finite is no panic",
            "esper/training/governor.py",
            "        if not_finite > 0 or not math.isfinite(loss):",
            "        if not_finite > 1e300:",
            "tests/env/test_env_host.py::test_a_broken_host_never_shows_in_the_observation",
        ),
        Fault(
            "the agent learns from numbers that are not finite",
            "esper/agents/ppo/agent.py",
            "        if broken:  #",
            "        if broken < 0:  #",
            "tests/agents/ppo/test_anomaly.py::test_a_number_that_is_not_finite_changes_nothing_and_is_reported",
        ),
    ],
    "trap 3": [
        Fault(
            "a rollback is never punished",
            "esper/core/reward_terms.py",
            "np.where(t.rolled_back, -config.rollback_penalty, 0.0)",
            "np.where(t.rolled_back & ~np.asarray(t.terminated), -config.rollback_penalty, 0.0)",
            "tests/env/test_env_host.py::test_a_panic_in_the_last_epoch_is_punished_too",
        ),
    ],
    "trap 4": [
        Fault(
            "a snapshot is taken while a divergence may have begun",
            "esper/training/governor.py",
            "        return due and not self.anomaly_pending",
            "        return due",
            "tests/training/test_governor.py::test_no_snapshot_while_an_anomaly_is_pending",
        ),
    ],
    "trap 5": [
        Fault(
            "fossils that are newer than the snapshot survive a rollback",
            "esper/env/host_row.py",
            "        gone[row] = slots.occupied[row] & [site.seed is None for site in self.sites]\n",
            "        gone[row] = False\n",
            "tests/env/test_host_row.py::test_a_fossil_made_in_the_step_of_the_panic_is_pruned",
        ),
    ],
    "trap 6": [
        Fault(
            "the scale of a seed has no gradient",
            "esper/core/blend.py",
            "        return x * self.weight\n",
            "        return x * self.weight.detach()\n",
            "tests/core/test_liveness.py::test_every_parameter_of_every_blueprint_is_alive_within_two_steps",
        ),
        Fault(
            "a seed that never passes its gate stays",
            "esper/core/gates.py",
            "    cut(slots, due & ~passed & stuck)\n",
            "",
            "tests/env/test_lifecycle.py::test_a_seed_that_blocks_an_automatic_g2_is_pruned_in_the_end",
        ),
    ],
    "trap 7": [
        Fault(
            "a gate has no optimizer",
            "esper/training/host_training.py",
            "                _learning(seed),",
            "                _learning(seed.body),",
            "tests/training/test_step.py::test_gate_parameters_are_optimised_and_each_parameter_has_one_owner",
        ),
    ],
    "trap 8": [
        Fault(
            "a seed is born at the scale of the features",
            "esper/core/blend.py",
            "AT_BIRTH = 0.1",
            "AT_BIRTH = 1.0",
            "tests/core/test_liveness.py::test_a_seed_keeps_the_shape_and_is_born_smaller_than_the_features",
        ),
        Fault(
            "an embargo takes twice its epochs",
            "esper/core/transitions.py",
            "slots.epochs_in_stage >= needed)",
            "slots.epochs_in_stage >= 2 * needed)",
            "tests/core/test_transitions.py::test_cooldown_is_one_embargo_one_and_each_tick_counts_once",
        ),
    ],
    "trap 9": [
        Fault(
            "a failed germination counts",
            "esper/training/host_training.py",
            "        with seeded(self._seed(RngStream.SEED, self.germinations)):\n            planted = "
            "site.plant(blueprint, style, probe, prepare, leading)\n        self.germinations += 1\n",
            "        self.germinations += 1\n        with seeded(self._seed(RngStream.SEED, self.germina"
            "tions)):\n            planted = site.plant(blueprint, style, probe, prepare, leading)\n",
            "tests/training/test_germination.py::test_a_failed_germination_does_not_shift_the_seeds_that_follow",
        ),
    ],
    "trap 10": [
        Fault(
            "without sinks gradients are not measured",
            "esper/env/epoch_loop.py",
            "        self._gates().update()\n        if self.reporter is not None:\n            self.reporter.opened",
            "        if self.reporter is not None:\n            self._gates().update()\n        if self.r"
            "eporter is not None:\n            self.reporter.opened",
            "tests/env/test_vector_env.py::test_seeds_pass_their_gates_without_any_sink",
        ),
    ],
    "trap 11": [
        Fault(
            "all hosts draw the same batches",
            "esper/training/host_training.py",
            "        self.order.manual_seed(self._seed(RngStream.DATA))",
            "        self.order.manual_seed(0)",
            "tests/training/test_step.py::test_an_epoch_is_floor_of_full_batches_of_the_hosts_own_permutation",
        ),
    ],
    "trap 12": [
        Fault(
            "a batch may be larger than an epoch",
            "esper/data/facts.py",
            "    if samples and batch > samples:\n",
            "    if samples and batch > 2 * samples:\n",
            "tests/data/test_task.py::test_an_impossible_batch_is_refused",
        ),
    ],
    "trap 13": [
        Fault(
            "collapse is judged by the loss as it is",
            "esper/training/governor.py",
            "        collapse = self.config.collapse_loss * self.chance",
            "        collapse = self.config.collapse_loss",
            "tests/training/test_governor.py::test_collapse_is_judged_in_units_of_chance",
        ),
    ],
    "trap 14": [
        Fault(
            "a saved host forgets how its seeds were blended",
            "esper/files/grown_host.py",
            "        operator = STYLES[seed.style].operator\n",
            '        operator = STYLES["LINEAR_ADD"].operator\n',
            "tests/files/test_grown_host.py::test_every_style_comes_back",
        ),
    ],
    "trap 15": [
        Fault(
            "a seed in used memory keeps the numbers of the one before",
            "esper/training/seed_pool.py",
            "                old.copy_(new)\n",
            "                new.copy_(old)\n",
            "tests/training/test_seed_pool.py::test_a_seed_in_used_memory_is_a_new_one_to_the_last_bit",
        ),
        Fault(
            "the loss scale of one episode is the next one's",
            "esper/training/precision.py",
            "            self._scaler.load_state_dict(self._at_first)\n",
            "            pass\n",
            "tests/training/test_float16.py::test_the_scale_of_one_episode_is_not_the_next_ones",
        ),
    ],
    "trap 16": [
        Fault(
            "padding counts in the results",
            "esper/data/objective.py",
            "        cross_entropy_into(outputs, y, accumulators,",
            "        cross_entropy_into(outputs, y.clamp(min=0), accumulators,",
            "tests/training/test_foreign_hosts.py::test_padding_counts_in_no_loss_and_no_accuracy",
        ),
        Fault(
            "padding counts in the gradients",
            "esper/data/objective.py",
            "        result = cross_entropy(outputs, y, ignore_index=PAD, label_smoothing=label_smoothing)",
            "        result = cross_entropy(outputs, y.clamp(min=0), ignore_index=PAD, label_smoothing="
            "label_smoothing)",
            "tests/training/test_foreign_hosts.py::test_values_behind_padding_change_no_weight",
        ),
    ],
    "trap 17": [
        Fault(
            "the rollout holds raw observations in place of normalised ones",
            "esper/agents/ppo/agent.py",
            "observation=seen,",
            "observation=raw,",
            "tests/agents/ppo/test_agent.py::test_the_rollout_stores_the_observations_that_were_acted_on",
        ),
    ],
    "trap 18": [
        Fault(
            "an update takes one step",
            "esper/agents/ppo/update.py",
            "    for _ in range(config.update_epochs):",
            "    for _ in range(1):",
            "tests/agents/ppo/test_agent.py::test_an_update_takes_several_steps_and_the_ratio_moves",
        ),
    ],
    "trap 19": [
        Fault(
            "every choice has a floor",
            "esper/agents/ppo/network.py",
            "        self.log_probs = torch.log_softmax(masked, dim=-1)",
            "        chances = torch.softmax(masked, dim=-1)\n"
            "        self.log_probs = (0.9 * chances + 0.1 / legal.shape[-1]).log()",
            "tests/agents/ppo/test_distribution.py::test_an_unlikely_choice_has_no_floor",
        ),
    ],
    "trap 20": [
        Fault(
            "an action that its gate refused is charged as done",
            "esper/core/reward_terms.py",
            "np.where(refused, config.refused_cost, cost)",
            "cost",
            "tests/core/test_reward_terms.py::test_the_cost_of_an_action_depends_on_its_outcome",
        ),
    ],
    "trap 21": [
        Fault(
            "the potential of a stage is that of the first slot",
            "esper/core/reward_terms.py",
            "    for slot in range(state.stage.shape[-1]):  #",
            "    for slot in range(1):  #",
            "tests/core/test_reward_terms.py::test_the_stage_potential_is_the_sum_over_all_slots",
        ),
        Fault(
            "the last potential of an episode is not taken back",
            "esper/core/reward_modes.py",
            "np.where(transition.terminated, 0.0, value)",
            "np.where(transition.terminated, value, value)",
            "tests/core/test_telescoping.py::test_potential_terms_of_an_episode_telescope_to_zero",
        ),
    ],
    "trap 22": [
        Fault(
            "the horizon is bootstrapped",
            "esper/agents/ppo/buffer.py",
            "torch.where(terminated[t], 0.0, bootstrap)",
            "torch.where(terminated[t], next_value, bootstrap)",
            "tests/agents/ppo/test_buffer.py::test_a_fixed_horizon_is_terminal_and_truncation_bootstraps",
        ),
        Fault(
            "a truncated episode is paid the outcome",
            "esper/core/reward_terms.py",
            "    return np.where(t.terminated, gained / config.benefit_scale, 0.0)",
            "    return np.asarray(gained / config.benefit_scale)",
            "tests/core/test_telescoping.py::test_the_outcome_is_paid_at_termination_only",
        ),
    ],
    "trap 23": [
        Fault(
            "rent is that of the step before",
            "esper/core/reward_terms.py",
            "    return -rent_rate(t.after.weighted_share,",
            "    return -rent_rate(t.before.weighted_share,",
            "tests/env/test_reward_observed.py::test_rewards_of_planted_follow_from_what_is_observed",
        ),
    ],
    "trap 24": [
        Fault(
            "the best host is that of the test",
            "esper/run/checkpointing.py",
            "        winner = int(committed.argmax())\n",
            "        winner = int(np.asarray(played.tests[0] if played.tests else committed).argmax())\n",
            "tests/run/test_best_host.py::test_the_best_host_is_chosen_by_validation_and_never_by_test_accuracy",
        ),
    ],
    "trap 25": [
        Fault(
            "acting costs more than it can bring",
            "esper/core/reward_terms.py",
            "    return -np.where(op == Op.WAIT, 0.0,",
            "    return -1000 * np.where(op == Op.WAIT, 0.0,",
            "tests/env/test_planted_best.py::test_under_every_mode_the_best_return_beats_waiting",
        ),
    ],
    "trap 26": [
        Fault(
            "the alarm of entropies compares with the wrong side",
            "esper/telemetry/anomaly.py",
            "choices >= limits.min_choices and entropy < limits.entropy",
            "choices >= limits.min_choices and entropy < -limits.entropy",
            "tests/agents/ppo/test_anomaly.py::test_the_entropy_warning_of_each_head_fires_at_entropies_that_training_reaches",
        ),
        Fault(
            "entropy is not relative to the number of options",
            "esper/agents/ppo/network.py",
            "/ highest * (options > 1)",
            "/ 1.0",
            "tests/agents/ppo/test_policy.py::test_entropies_can_reach_both_ends",
        ),
    ],
    "trap 27": [
        Fault(
            "the heuristic keeps nothing",
            "esper/agents/heuristic.py",
            'contribution = 10 * view.slot(slot, "contribution")',
            "contribution = -1e9",
            "tests/agents/test_heuristic.py::test_the_heuristic_fossilizes_what_contributes",
        ),
    ],
    "trap 28": [
        Fault(
            "the larger mean wins",
            "esper/compare/statistics.py",
            "        if self.few or not significant:",
            "        if self.few:",
            "tests/compare/test_statistics.py::test_the_larger_average_is_no_winner_by_itself",
        ),
    ],
    "trap 29": [
        Fault(
            "a falling loss is charged",
            "esper/core/reward_terms.py",
            "    gained = t.after.baseline_loss - t.after.committed_loss",
            "    gained = t.after.committed_loss - t.after.baseline_loss",
            "tests/core/test_loss_family.py::test_a_fall_of_the_tracked_loss_is_paid_and_not_charged",
        ),
    ],
    "trap 30": [
        Fault(
            "a resumed agent draws its minibatches anew",
            "esper/agents/ppo/agent.py",
            '        self.generator.set_state(state["generator"])\n',
            "",
            "tests/agents/ppo/test_agent.py::test_state_round_trip_goes_on_with_the_same_bits",
        ),
    ],
}
