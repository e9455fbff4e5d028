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
            "        if parameter is not None and parameter.requires_grad and id(parameter) in self._numbers:",
            "        if False:",
            "tests/ops/test_tape.py::test_a_parameter_that_layers_share_is_refused_unless_it_is_frozen",
        ),
    ],
}
