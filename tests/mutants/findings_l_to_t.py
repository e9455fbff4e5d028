"""Mutants for rows L, T and G of the findings."""

from __future__ import annotations

from tests.fault import Fault

MUTANTS: dict[str, list[Fault]] = {
    "L1": [
        Fault(
            "a host on a plateau goes on",
            "esper/env/epoch_loop.py",
            '        if "plateau" in self.config.stop_on:',
            '        if "plateau" not in self.config.stop_on:',
            "tests/env/test_early_stop.py::test_a_plateau_cuts_the_episode_short",
        ),
        Fault(
            "an early stop counts as the end",
            "esper/env/epoch_loop.py",
            "        state.truncated |= active & ~over & stops\n        state.done |= over | state.truncated",
            "        state.done |= over | (active & stops)",
            "tests/env/test_early_stop.py::test_a_panic_cuts_the_episode_short_after_its_rollback",
        ),
    ],
    "L2": [
        Fault(
            "validation keeps its graph",
            "esper/training/validate.py",
            "    with kept_modes(*modules), training.host.without_gradients():",
            "    with kept_modes(*modules):",
            "tests/training/test_validate.py::test_validation_runs_in_inference_mode_and_in_the_precision_of_training",
        ),
    ],
    "L3": [
        Fault(
            "bfloat16 is taken where it is slow",
            "esper/training/precision.py",
            '        return "bfloat16" if multiplies_bfloat16(device) else "float32"',
            '        return "bfloat16"',
            "tests/training/test_precision.py::test_auto_is_bfloat16_where_the_device_multiplies_it",
        ),
    ],
    "L4": [
        Fault(
            "parts count as whole batches",
            "esper/training/step.py",
            "    loss = mean if share is None else mean * share\n",
            "    loss = mean\n",
            "tests/training/test_micro_batching.py::test_a_step_in_parts_is_the_step_of_the_whole_batch",
        ),
    ],
    "L5": [
        Fault(
            "a fossil waits for the next snapshot",
            "esper/training/governor.py",
            "        due = fossilized or self._saved == 0",
            "        due = self._saved == 0",
            "tests/training/test_governor.py::test_a_snapshot_every_five_epochs_and_when_a_seed_fossilizes",
        ),
    ],
    "L6": [
        Fault(
            "hosts have blocks of sums of their own",
            "esper/training/host_trainer.py",
            "        totals = blocks[place].pop(0)",
            "        totals = make_metrics(1, task.device, max_configurations(sites), len(task.validation), "
            "task.objective.dtype)[0]",
            "tests/env/test_vector_env.py::test_all_envs_count_in_one_block_each_in_a_row_of_its_own",
        ),
    ],
    "L7": [
        Fault(
            "the health of a gradient norm is all or nothing",
            "esper/agents/ppo/update.py",
            "    return max(0.0, 1 - max(below, above, 0.0) / 2)",
            "    return float(max(below, above, 0.0) == 0)",
            "tests/agents/ppo/test_update.py::test_gradient_health_is_continuous",
        ),
    ],
    "L8": [
        Fault(
            "the governor's window has ten losses",
            "esper/training/governor.py",
            "        self.losses: deque[float] = deque(maxlen=self.durations.governor_window)",
            "        self.losses: deque[float] = deque(maxlen=10)",
            "tests/training/test_governor.py::test_the_governors_window_holds_the_last_losses",
        ),
    ],
    "L9": [
        Fault(
            "a value of the config has no docstring",
            "esper/config/telemetry.py",
            '    """Low entropy is reported only in this first fraction of all rounds; later it may be normal."""\n',
            "",
            "tests/tooling/test_house.py::test_every_value_of_the_configuration_has_a_manual",
        ),
    ],
    "L10": [
        Fault(
            "a block on a GPU is timed by the clock",
            "esper/telemetry/timer.py",
            '        if self.device.type == "cuda":\n            event',
            '        if self.device.type == "cuda:0":\n            event',
            "tests/telemetry/test_timer.py::test_cuda_measures_the_work_between_two_events_of_its_devic"
            "e_and_waits_only_when_read",
        ),
    ],
    "T1": [
        Fault(
            "a rollback restores weights only",
            "esper/training/snapshot.py",
            "        fill(training.network_tensors(self.measured), self.tensors)",
            "        fill(((n, t) for n, t in training.network_tensors(self.measured) if "
            '"momentum" not in n), self.tensors)',
            "tests/env/test_host_row.py::test_a_rollback_restores_bit_for_bit",
        ),
    ],
    "G1": [
        Fault(
            "an illegal choice has no logit at all",
            "esper/agents/ppo/network.py",
            "MASKED_LOGIT = -1e4",
            'MASKED_LOGIT = float("-inf")',
            "tests/agents/ppo/test_distribution.py::test_an_illegal_choice_breaks_no_gradient",
        ),
        Fault(
            "rewards are shifted",
            "esper/agents/ppo/agent.py",
            "        scaled = reward / self.rewards.scale",
            "        scaled = (reward - reward.mean()) / self.rewards.scale",
            "tests/agents/ppo/test_agent.py::test_rewards_are_divided_and_never_shifted",
        ),
        Fault(
            "statistics are those of scaled gradients",
            "esper/training/step.py",
            "    training.arithmetic.unscale(group.optimizer for group in groups)\n",
            "",
            "tests/training/test_float16.py::test_the_step_is_that_of_the_loss_whatever_its_scale",
        ),
        Fault(
            "envs take devices in blocks",
            "esper/training/host_trainer.py",
            "    return index % devices",
            "    return index // devices % devices",
            "tests/training/execution/test_multi_gpu.py::test_envs_take_devices_in_turn",
        ),
        Fault(
            "two seeds of an episode draw the same numbers",
            "esper/training/host_training.py",
            "        with seeded(self._seed(RngStream.SEED, self.germinations)):",
            "        with seeded(self._seed(RngStream.SEED)):",
            "tests/training/test_germination.py::test_two_seeds_of_an_episode_start_differently_and_eac"
            "h_the_same_in_every_run",
        ),
    ],
}
