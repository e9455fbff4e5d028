"""Faults in what a Grower takes from people's own loops: modes, methods, groups, exporters and inputs."""

from __future__ import annotations

from tests.fault import Fault

MUTANTS: dict[str, list[Fault]] = {
    "own loops": [
        Fault(
            "a model notices a seed only at the end",
            "esper/grower/layouts.py",
            "    changed = difference(before, after)\n",
            "    changed = None\n",
            "tests/grower/test_checks.py::test_a_model_that_would_notice_its_seeds_gets_none",
        ),
        Fault(
            "loading the advisor draws from the caller's generator",
            "esper/agents/advisor.py",
            "    with kept_generators():  # from which the caller's training may draw\n",
            "    if True:\n",
            "tests/agents/test_advisor.py::test_loading_the_advisor_leaves_the_random_numbers_of_the_caller",
        ),
        Fault(
            "seeds are made in inference mode",
            "esper/ops/torch_state.py",
            "    with torch.inference_mode(False), torch.no_grad():\n",
            "    with torch.no_grad():\n",
            "tests/grower/test_randomness.py::test_a_loop_may_step_and_finish_in_inference_mode",
        ),
        Fault(
            "a model in eval mode is said to run without gradients",
            "esper/grower/env.py",
            "        elif not trained_at(hooks).issuperset(untaught):\n",
            "        elif False:\n",
            "tests/grower/test_checks.py::test_a_model_that_is_left_in_eval_mode_is_named_as_the_cause",
        ),
        Fault(
            "a trace of a growing model holds its seed",
            "esper/grower/passes.py",
            "    if is_traced():\n",
            "    if False:\n",
            "tests/grower/test_copies.py::test_a_growing_model_is_not_exported_and_its_copy_is",
        ),
        Fault(
            "a trace of a vacant model leaves its tensors in the Grower",
            "esper/grower/sites.py",
            "        if hook.in_average or transformed or is_traced():\n",
            "        if hook.in_average or transformed:\n",
            "tests/grower/test_copies.py::test_a_vacant_model_is_traced_as_it_is_and_grows_on",
        ),
        Fault(
            "torch says what it cannot script in seeds",
            "esper/hosts/container.py",
            "        raise ConfigError(NOT_SCRIPTED)\n",
            "        return None\n",
            "tests/grower/test_copies.py::test_a_script_of_seeds_is_refused_with_what_works",
        ),
        Fault(
            "a group with the key of seeds is taken for that of a seed",
            "esper/grower/stepping.py",
            "    require_known(optimizer, _given.get(optimizer, ()))\n",
            "",
            "tests/grower/test_checks.py::test_a_group_that_has_the_key_of_seeds_is_refused",
        ),
        Fault(
            "torch says that a distributed checkpoint lacks a key",
            "esper/grower/optimizer.py",
            "    if groups._parameters and not groups.closed:\n        refuse",
            "    if False:\n        refuse",
            "tests/grower/test_gradients.py::test_a_distributed_checkpoint_of_growing_seeds_is_refused_with_what_works",
        ),
        Fault(
            "zeros are gradients set by hand",
            "esper/grower/gradients.py",
            "        if any(map(has_gradient, self._watched)):\n",
            "        if any(parameter.grad is not None for parameter in self._watched):\n",
            "tests/grower/test_gradients.py::test_zeros_that_make_the_state_of_an_optimizer_are_no_gradients_set_by_hand",
        ),
        Fault(
            "a loop that calls methods moves no seed",
            "esper/grower/sites.py",
            "        self.passes.at_site(self.model.training)\n",
            "",
            "tests/grower/test_layouts.py::test_seeds_of_a_loop_that_calls_methods_follow_the_model_to_another_dtype",
        ),
        Fault(
            "a loop that calls methods keeps gradients of batches without a step",
            "esper/grower/passes.py",
            "        if training and self.last is None and not self.shadow:\n",
            "        if False:\n",
            "tests/grower/test_layouts.py::test_a_loop_that_calls_methods_trains_seeds_as_one_that_calls_the_model",
        ),
        Fault(
            "a site within vmap is said not to run",
            "esper/grower/sites.py",
            "            self.passes.transformed.add(name)\n",
            "            pass\n",
            "tests/grower/test_layouts.py::test_a_site_within_a_transform_is_refused_with_the_reason",
        ),
        Fault(
            "an iterator is an argument of several passes",
            "esper/hosts/example.py",
            "    if any(isinstance(value, Iterator) for value in (*arguments, *keywords.values())):\n",
            "    if False:\n",
            "tests/grower/test_checks.py::test_an_argument_that_a_pass_uses_up_is_named",
        ),
        Fault(
            "only masks of Hugging Face are masks",
            "esper/grower/layouts.py",
            "    return value.dtype is torch.bool or any(part in str(name).lower() for part in MASKS)\n",
            '    return name == "attention_mask"\n',
            "tests/grower/test_layouts.py::test_a_mask_of_any_usual_name_keeps_seeds_from_mixing_positions",
        ),
    ],
}
