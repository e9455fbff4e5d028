"""Mutants for rows M of the findings."""

from __future__ import annotations

from tests.fault import Fault

MUTANTS: dict[str, list[Fault]] = {
    "M1": [
        Fault(
            "a table of stages is written as conditions",
            "esper/core/transitions.py",
            "def fossilize(slots: Slots, where: Bools) -> None:",
            "def _after(stage: SeedStage) -> SeedStage:\n    if stage is SeedStage.GERMINATED:\n        r"
            "eturn SeedStage.TRAINING\n    elif stage is SeedStage.TRAINING:\n        return SeedStage.BL"
            "ENDING\n    elif stage is SeedStage.BLENDING:\n        return SeedStage.HOLDING\n    return s"
            "tage\n\n\ndef fossilize(slots: Slots, where: Bools) -> None:",
            "tests/tooling/test_house.py::test_what_a_stage_may_become_is_a_table",
        ),
    ],
    "M2": [
        Fault(
            "several hosts pass for a single env",
            "esper/env/single.py",
            "        if env.num_envs != 1 or mode is not",
            "        if mode is not",
            "tests/env/test_single.py::test_a_view_of_many_or_of_what_resets_itself_is_refused",
        ),
    ],
    "M3": [
        Fault(
            "a large step is taken all the same",
            "esper/agents/ppo/update.py",
            '            if measured["approx_kl"] > config.kl_stop * config.target_kl:',
            '            if measured["approx_kl"] > 1e6 * config.kl_stop * config.target_kl:',
            "tests/agents/ppo/test_agent.py::test_a_large_step_stops_at_the_kl_target",
        ),
        Fault(
            "an update takes the whole round at once",
            "esper/agents/ppo/update.py",
            "order.tensor_split(n_minibatches)",
            "order.tensor_split(1)",
            "tests/agents/ppo/test_update.py::test_an_update_passes_over_whole_sequences_several_times",
        ),
    ],
    "M4": [
        Fault(
            "a truncated episode bootstraps from the next episode",
            "esper/agents/ppo/buffer.py",
            "torch.where(truncated[t], final_values[t], next_value)",
            "next_value",
            "tests/agents/ppo/test_buffer.py::test_equals_the_reference",
        ),
        Fault(
            "the last value forgets the recurrent state",
            "esper/agents/ppo/policy.py",
            "        scene, _ = self._look(seen)\n        return",
            "        scene, _ = self.network.encode(seen[None], self.state, torch.ones_like(self.starts[None]))\n"
            "        return",
            "tests/agents/ppo/test_agent.py::test_truncation_bootstraps_from_the_state_and_the_memory_after_the_action",
        ),
    ],
    "M5": [
        Fault(
            "workers end with each epoch",
            "esper/data/shared_batches.py",
            "persistent_workers=workers > 0",
            "persistent_workers=False",
            "tests/data/test_shared_batches.py::test_workers_stay_alive_over_epochs",
        ),
    ],
    "M6": [
        Fault(
            "a private function of torch is called",
            "esper/training/step.py",
            "def learning_rate(",
            "def _norms(tensors: list[Tensor]) -> list[Tensor]:\n    return torch._foreach_norm(tensors)"
            "\n\n\ndef learning_rate(",
            "tests/tooling/test_public_torch.py::test_no_private_api_of_torch_is_called",
        ),
    ],
    "M7": [
        Fault(
            "a norm over several devices is that of one",
            "esper/grower/gradients.py",
            'tensors, norm = fields["tensors"], fields["sum_sq"].sqrt()',
            'tensors, norm = fields["tensors"], parts[0, :, FIELDS.index("sum_sq")].sqrt()',
            "tests/grower/test_gradients.py::test_statistics_of_several_devices_are_those_of_one",
        ),
    ],
    "M8": [
        Fault(
            "a device is compared with a text",
            "esper/training/execution/gpu.py",
            "    def synchronize(self)",
            '    def is_here(self) -> bool:\n        return self.device == "cuda"\n\n    def synchronize(self)',
            "tests/tooling/test_house.py::test_no_device_is_compared_with_a_string",
        ),
    ],
    "M9": [
        Fault(
            "batches have another size than the user's",
            "esper/training/batches.py",
            "        self.batch_size = batch_size",
            "        self.batch_size = batch_size // 2",
            "tests/training/test_step.py::test_an_epoch_is_floor_of_full_batches_of_the_hosts_own_permutation",
        ),
    ],
    "M10": [
        Fault(
            "two sites may have one name",
            "esper/hosts/host.py",
            "    twice = {name for name in ordered if ordered.count(name) > 1}",
            "    twice = {name for name in ordered if ordered.count(name) > 2}",
            "tests/hosts/test_host.py::test_slot_names_are_checked_in_one_place_and_doubles_are_refused",
        ),
    ],
    "M11": [
        Fault(
            "each host is read by itself",
            "esper/env/training_backend.py",
            "        for of_one_device in blocks.values():\n            _transfer(of_one_device, state)",
            "        for of_one_device in blocks.values():\n            for host in of_one_device:\n     "
            "           _transfer([host], state)",
            "tests/env/test_training_backend.py::test_a_step_brings_everything_over_in_two_transfers",
        ),
    ],
    "M12": [
        Fault(
            "a lack of memory is an error like any other",
            "esper/training/host_trainer.py",
            "if all(map(ran_out, error.causes)):",
            "if not any(map(ran_out, error.causes)):",
            "tests/training/test_host_trainer.py::test_a_shortage_is_an_error_that_says_what_takes_less",
        ),
        Fault(
            "an error does not say which host it is of",
            "esper/training/execution/workers.py",
            "                errors.append(HostError(host, error))",
            "                errors.append(HostError(tuple(hosts)[0], error))",
            "tests/training/execution/test_workers.py::test_an_error_names_env_epoch_and_batch_and_the_others_finish",
        ),
    ],
    "M13": [
        Fault(
            "a reset leaves the results of before",
            "esper/training/counterfactual.py",
            "        self.correct: NDArray[np.float64] = np.zeros((0, 0))\n        self.counts",
            '        self.correct: NDArray[np.float64] = getattr(self, "correct", np.zeros((0, 0)))\n   '
            "     self.counts",
            "tests/training/test_counterfactual.py::test_reset_forgets_the_matrix",
        ),
    ],
    "M14": [
        Fault(
            "a flipped sign counts only if it is more extreme",
            "esper/compare/statistics.py",
            ">= abs(values.sum()) - tolerance",
            "> abs(values.sum()) + tolerance",
            "tests/compare/test_statistics.py::test_sign_flip_known_values",
        ),
        Fault(
            "p values are not corrected",
            "esper/compare/statistics.py",
            "factors * values[order]",
            "values[order]",
            "tests/compare/test_statistics.py::test_holm_known_values",
        ),
        Fault(
            "arms are played one after the other",
            "esper/compare/runner.py",
            "name = ready[order.integers(len(ready))]",
            "name = ready[0 * order.integers(len(ready))]",
            "tests/compare/test_runner.py::test_rounds_are_interleaved_in_random_order",
        ),
    ],
    "M15": [
        Fault(
            "a loss mode takes hosts whose loss has no spread",
            "esper/config/training.py",
            'self.reward.mode.startswith("loss_") and self.env.baseline_episodes < 2:',
            'self.reward.mode.startswith("loss_") and self.env.baseline_episodes < 1:',
            "tests/core/test_loss_family.py::test_a_loss_mode_needs_hosts_to_measure_a_standard_deviation_from",
        ),
    ],
    "M16": [
        Fault(
            "a limit of the alarms is not in the config",
            "esper/telemetry/anomaly.py",
            "        high = self.limits.ratio_high\n",
            "        high = 10.0\n",
            "tests/agents/ppo/test_anomaly.py::test_every_limit_is_in_the_configuration",
        ),
    ],
    "M17": [
        Fault(
            "a hub takes events of any thread",
            "esper/telemetry/hub.py",
            "        if threading.get_ident() != self._thread:",
            "        if threading.get_ident() == 0:",
            "tests/telemetry/test_hub.py::test_events_come_from_the_owning_thread_only",
        ),
    ],
    "M18": [
        Fault(
            "every env reads the rows of the first one's stream",
            "esper/data/shared_batches.py",
            "generator=self.generators[env])",
            "generator=self.generators[0])",
            "tests/data/test_shared_batches.py::test_each_env_gets_the_rows_of_its_own_stream",
        ),
        Fault(
            "a short batch is passed on",
            "esper/data/shared_batches.py",
            "            if not len(x) == len(y) == self.batch_size:",
            "            if not len(x) == len(y):",
            "tests/data/test_shared_batches.py::test_a_step_without_one_equal_batch_an_env_raises",
        ),
    ],
    "M19": [
        Fault(
            "the heuristic plants in the first slot only",
            "esper/agents/heuristic.py",
            "sorted(self.spec.slots, key=failures.count)",
            "self.spec.slots[:1]",
            "tests/agents/test_heuristic.py::test_the_heuristic_fills_every_slot",
        ),
    ],
    "M20": [
        Fault(
            "each reset makes a new host",
            "esper/training/host_training.py",
            "    host.load_state_dict(fresh.state_dict())\n",
            "    host.load_state_dict(fresh.state_dict(), assign=True)\n",
            "tests/env/test_flat_memory.py::test_reset_fills_the_storage_of_the_host_before",
        ),
    ],
    "M21": [
        Fault(
            "observations outlive their round",
            "esper/agents/ppo/buffer.py",
            "    def clear(self) -> None:\n        self._steps.clear()\n",
            "    def clear(self) -> None:\n        self._steps = list(self._steps)\n",
            "tests/agents/ppo/test_policy.py::test_raw_observations_are_kept_in_the_rollout_and_go_with_it",
        ),
    ],
    "M22": [
        Fault(
            "an event of an env does not name it",
            "esper/telemetry/event.py",
            "class EpisodeCompleted(Event):\n    env: int",
            "class EpisodeCompleted(Event):\n    host: int",
            "tests/telemetry/test_event.py::test_events_of_an_env_name_it",
        ),
    ],
}
