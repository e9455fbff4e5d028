"""Faults in networks that run as tapes."""

from __future__ import annotations

from tests.fault import Fault

MUTANTS: dict[str, list[Fault]] = {
    "tapes": [
        Fault(
            "a ReLU turns NaN into zero",
            "csrc/tape/lanes.h",
            "        return x <= zero ? zero : x;",
            "        return x > zero ? x : zero;",
            "tests/ops/test_tape.py::test_a_number_that_is_not_finite_comes_out_as_in_pytorch",
        ),
        Fault(
            "lanes without a sample count in the variance",
            "csrc/tape/batch_norm.h",
            "total(only(squares, count))",
            "total(squares)",
            "tests/ops/test_tape.py::test_a_layer_equals_pytorch",
        ),
        Fault(
            "the variance is not corrected by what is left of the mean",
            "csrc/tape/batch_norm.h",
            "centred.squares / n - centred.sum / n * (centred.sum / n)",
            "moments(machine, in, c, 0).squares / n - centre * centre",
            "tests/ops/test_tape.py::test_the_variance_of_values_far_from_zero_is_exact",
        ),
        Fault(
            "lanes without a sample grow from norm to norm",
            "csrc/tape/batch_norm.h",
            "store(only(layer.relu ? relu(result) : result, count), to + x);",
            "store(layer.relu ? relu(result) : result, to + x);",
            "tests/ops/test_tape.py::test_lanes_without_a_sample_overflow_nothing",
        ),
        Fault(
            "the last gradient of a value replaces the others",
            "csrc/tape/machine.h",
            "    store(adds ? load(at) + gradient : gradient, at);",
            "    store(adds ? gradient : gradient, at);",
            "tests/ops/test_tape.py::test_values_that_are_read_twice_gather_both_gradients",
        ),
        Fault(
            "the last of equal numbers is the largest",
            "csrc/tape/pool.h",
            "    return (x > best) | (x != x);",
            "    return (x >= best) | (x != x);",
            "tests/ops/test_tape.py::test_the_first_of_equal_numbers_is_the_largest",
        ),
        Fault(
            "a gradient that several layers share is written once",
            "esper/ops/tape.py",
            "        if learns and (id(parameter), True) in self._numbers:",
            "        if False:",
            "tests/ops/test_tape.py::test_a_parameter_that_layers_share_is_refused_unless_it_is_frozen",
        ),
        Fault(
            "a layer that comes twice runs once",
            "esper/training/native_program.py",
            "module._modules.items():",
            "module.named_children():",
            "tests/training/test_native.py::test_what_has_no_compiled_form_is_named_and_left_to_pytorch",
        ),
        Fault(
            "an incubating seed teaches the host",
            "esper/training/native_program.py",
            "        tape.learning = {id(parameter) for parameter in training.seed_groups[site.name].parameters}",
            "        tape.learning = None",
            "tests/training/test_native.py::test_an_epoch_and_a_validation_are_those_of_pytorch",
        ),
        Fault(
            "a shadow pass updates the host's statistics",
            "esper/training/native_program.py",
            "        with training.shadow_of(site).in_place(), copied_buffers(others):",
            "        with copied_buffers(others):",
            "tests/training/test_native.py::test_an_epoch_and_a_validation_are_those_of_pytorch",
        ),
        Fault(
            "a seed that was cut keeps its gradient",
            "csrc/tape/seed.h",
            "        passes = *machine.kept(instruction, 1) != 0;",
            "        passes = true;",
            "tests/training/test_native.py::test_a_seed_that_is_not_finite_is_cut_as_pytorch_cuts_it",
        ),
        Fault(
            "seeds are clipped apart from the host",
            "csrc/tape/epoch.cpp",
            "        if (together > 1) {",
            "        if (together > 99) {",
            "tests/training/test_native.py::test_seeds_in_many_slots_and_widenings_learn_side_by_side",
        ),
        Fault(
            "a seed of before answers for a new one",
            "esper/training/native_program.py",
            "            yield site.learning\n            yield site.seed\n",
            "            yield site.learning\n",
            "tests/training/test_native.py::test_seeds_of_earlier_epochs_leave_no_trace",
        ),
    ],
}
