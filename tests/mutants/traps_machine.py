"""Mutants for the traps of the machine."""

from __future__ import annotations

from tests.fault import Fault

MUTANTS: dict[str, list[Fault]] = {
    "trap 31": [
        Fault(
            "a row of sums is not zeroed before its epoch",
            "esper/training/step.py",
            "    training.totals.zero_training()\n",
            "",
            "tests/training/test_host_trainer.py::test_a_streamed_epoch_is_begun_by_the_worker_that_adds_to_it",
        ),
    ],
    "trap 32": [
        Fault(
            "streams do not wait for what was queued before",
            "esper/training/execution/gpu.py",
            "                stream.wait_event(event)\n",
            "                pass\n",
            "tests/training/execution/test_gpu.py::test_a_fork_comes_after_what_was_queued_and_a_join_before_what_is",
        ),
        Fault(
            "streams are not waited for after an error",
            "esper/training/execution/streams.py",
            "            error = raised\n        try:\n            self.gpu.join(streams)",
            "            raise\n        try:\n            self.gpu.join(streams)",
            "tests/training/execution/test_stream_order.py::test_streams_follow_what_was_queued_and_are"
            "_waited_for_even_after_an_error",
        ),
    ],
    "trap 33": [
        Fault(
            "a streamed batch is waited for",
            "esper/training/host_trainer.py",
            "x = x.to(training.device, non_blocking=True)",
            "x = x.to(training.device)",
            "tests/training/test_host_trainer.py::test_a_batch_that_streams_in_is_copied_without_a_wait",
        ),
    ],
    "trap 34": [
        Fault(
            "hosts share one loss scale",
            "esper/training/precision.py",
            '        self._scaler = torch.amp.GradScaler(device.type) if self.precision == "float16" else None\n',
            '        self._scaler = _SHARED if self.precision == "float16" else None\n',
            "tests/training/test_float16.py::test_every_host_has_a_scale_of_its_own",
        ),
    ],
    "trap 35": [
        Fault(
            "streams come from torch's pool",
            "esper/training/execution/streams.py",
            "        if index not in self._streams:\n            self._streams[index] = self.gpu.stream()",
            "        index %= 32\n        if index not in self._streams:\n            self._streams[index"
            "] = self.gpu.stream()",
            "tests/training/execution/test_stream_order.py::test_forty_one_envs_have_forty_one_streams",
        ),
    ],
    "trap 36": [
        Fault(
            "all graphs are launched on the first host's stream",
            "esper/training/execution/gpu.py",
            "[stream.cuda_stream for stream in streams]",
            "[streams[0].cuda_stream for _ in streams]",
            "tests/training/execution/test_gpu.py::test_work_is_captured_and_launched_on_its_stream_and_in_its_memory",
        ),
    ],
    "trap 37": [
        Fault(
            "captured work of all hosts has one memory",
            "esper/training/execution/gpu.py",
            "        return torch.cuda.graph_pool_handle()",
            '        self._only = getattr(self, "_only", None) or torch.cuda.graph_pool_handle()\n      '
            "  return self._only",
            "tests/training/execution/test_gpu.py::test_work_is_captured_and_launched_on_its_stream_and_in_its_memory",
        ),
    ],
    "trap 38": [
        Fault(
            "autograd runs backward passes on its own thread",
            "esper/training/execution/gpu.py",
            "torch.autograd.set_multithreading_enabled(False)",
            "torch.autograd.set_multithreading_enabled(True)",
            "tests/training/execution/test_one_thread.py::test_the_backward_passes_of_a_gpus_host_are_q"
            "ueued_by_the_thread_that_queues_the_rest",
        ),
    ],
    "trap 39": [
        Fault(
            "each piece of work has a new stream",
            "esper/training/execution/streams.py",
            "        if index not in self._streams:\n",
            "        if True:\n",
            "tests/training/execution/test_stream_order.py::test_an_env_has_one_stream_for_warming_up_c"
            "apturing_and_launching",
        ),
    ],
    "trap 40": [
        Fault(
            "the rate of an epoch is a new tensor",
            "esper/training/warmup.py",
            "        self._scheduled.fill_(scheduled)\n",
            "        self.rate = torch.full_like(self.rate, scheduled)\n",
            "tests/training/test_optimizers.py::test_host_and_seeds_read_one_rate_on_the_device",
        ),
    ],
    "trap 41": [
        Fault(
            "a host without segments has no reason to stay eager",
            "esper/training/execution/compiled.py",
            '    if not isinstance(host, SegmentedHost):\n        return f"{type(host).__name__} is not '
            'a SegmentedHost, and has no separate segments to compile"\n',
            "",
            "tests/training/execution/test_compiled.py::test_grafted_hosts_and_hosts_that_draw_have_a_reason",
        ),
    ],
    "trap 42": [
        Fault(
            "small entries are summed in float32",
            "csrc/grad_stats.h",
            "constexpr float kTrustedMin = 1e-25f;",
            "constexpr float kTrustedMin = 0.0f;",
            "tests/ops/test_grad_stats.py::test_entries_whose_squares_do_not_fit_float32",
        ),
    ],
}
