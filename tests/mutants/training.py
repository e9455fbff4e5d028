"""Mutants of training: compiled steps, ranks, and hosts that start from trained ones."""

from __future__ import annotations

from tests.fault import Fault

MUTANTS: dict[str, list[Fault]] = {
    "compiled steps": [
        Fault(
            "the compiler is not told of the sizes of parts",
            "esper/training/execution/compiled.py",
            "batch.tensor_split(training.config.task.micro_batches)",
            "batch.tensor_split(1)",
            "tests/training/execution/test_compiled.py::"
            "test_the_sizes_that_are_compiled_are_those_of_parts_and_of_last_batches",
        ),
    ],
    "ranks": [
        Fault(
            "the first ranks have a host too many",
            "esper/training/execution/ranks.py",
            "        if rank < larger:",
            "        if rank <= larger:",
            "tests/training/execution/test_ranks.py::test_hosts_are_divided_in_order_and_evenly",
        ),
        Fault(
            "ranks of a second machine take other devices",
            "esper/training/execution/ranks.py",
            "devices[self.local_rank % len(devices)]",
            "devices[self.rank * 2 % len(devices)]",
            "tests/training/execution/test_ranks.py::test_ranks_of_a_machine_take_its_devices_in_turn",
        ),
        Fault(
            "a rank that hangs counts as gone",
            "esper/training/execution/ranks.py",
            'hangs = "timed out" in str(error).lower()',
            "hangs = False",
            "tests/training/execution/test_ranks.py::"
            "test_a_rank_that_is_gone_or_silent_is_named_before_anything_is_sent_to_it",
        ),
        Fault(
            "the error of a rank is its result",
            "esper/training/execution/ranks.py",
            "            if kind is None:\n                results[rank] = result",
            "            if True:\n                results[rank] = result",
            "tests/run/test_ranks.py::test_a_rank_that_fails_ends_the_run_and_is_named",
        ),
        Fault(
            "other ranks do not validate",
            "esper/env/rank_hosts.py",
            "TrainingBackend.train, TrainingBackend.measure, TrainingBackend.govern",
            "TrainingBackend.train, TrainingBackend.govern",
            "tests/run/test_ranks.py::test_ranks_train_the_hosts_of_one_process[small-2]",
        ),
        Fault(
            "a rank waits for others at an address that nobody gave",
            "esper/cli/launch.py",
            'complete = "MASTER_ADDR" in os.environ and',
            "complete =",
            "tests/cli/test_launch.py::test_a_rank_that_torchrun_has_not_set_up_is_refused",
        ),
    ],
    "hosts that start from trained ones": [
        Fault(
            "each episode of a run has a start of its own",
            "esper/training/start.py",
            "episode = host.episode if is_held_out(host.run_seed) else 0",
            "episode = host.episode",
            "tests/training/test_start.py::"
            "test_the_episodes_of_a_run_start_from_the_same_weights_and_draw_other_batches",
        ),
        Fault(
            "training goes on for any gain",
            "esper/training/start.py",
            "            if gain >= MIN_GAIN:",
            "            if gain > -100:",
            "tests/training/test_start.py::test_training_goes_on_until_half_a_schedule_gains_less_than_the_margin",
        ),
        Fault(
            "what was trained is not kept",
            "esper/training/start.py",
            "            _write(file, weights)\n",
            "",
            "tests/training/test_start.py::test_what_is_trained_is_kept_and_used_again",
        ),
        Fault(
            "a host that diverged is a start",
            "esper/training/start.py",
            "    if not math.isfinite(loss):",
            "    if False:",
            "tests/training/test_start.py::"
            "test_a_host_that_diverges_before_it_starts_is_an_error_that_says_what_to_change",
        ),
        Fault(
            "other data have the start of these",
            "esper/training/start.py",
            "*_data_of(start.task), ",
            "",
            "tests/training/test_start.py::test_other_settings_or_other_data_are_another_training",
        ),
    ],
}
