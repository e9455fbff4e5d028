"""Faults in the contracts with torch, the process and the shell that operators and commands keep."""

from __future__ import annotations

from tests.fault import Fault

OPTIMIZER = "esper/ops/optimizer.py"
OPTIMIZERS = "tests/ops/test_optimizer_contract.py::"
NATIVE = "tests/ops/test_native.py::"

MUTANTS: dict[str, list[Fault]] = {
    "contracts": [
        Fault(
            "groups share the rate that is given",
            OPTIMIZER,
            'group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float64, device=_device_of(self))',
            "pass",
            OPTIMIZERS + "test_each_group_owns_its_rate",
        ),
        Fault(
            "a generator of parameters is used up before the vectors are found",
            OPTIMIZER,
            "    found: list[Any] = list(params)\n",
            "    found: list[Any] = list(params)[:1]\n",
            OPTIMIZERS + "test_every_parameter_that_is_given_learns",
        ),
        Fault(
            "options that are written to a group are not checked",
            OPTIMIZER,
            "            optimizer.check_fixed(group)\n",
            "",
            OPTIMIZERS
            + "test_options_that_only_torchs_optimizer_has_are_refused_wherever_they_come_from",
        ),
        Fault(
            "all groups take the options of the first",
            OPTIMIZER,
            "            options = optimizer.options_of(group)\n",
            "            options = optimizer.options_of(optimizer.param_groups[0])\n",
            OPTIMIZERS + "test_groups_have_options_of_their_own",
        ),
        Fault(
            "operators raise no versions",
            "esper/ops/_native.py",
            "                        torch.autograd.graph.increment_version(argument)\n",
            "                        pass\n",
            NATIVE + "test_what_an_operator_writes_to_gets_another_version",
        ),
        Fault(
            "forward-mode derivatives are zero",
            "esper/ops/_native.py",
            "    if forward_ad._current_level >= 0:\n",
            "    if False:\n",
            NATIVE + "test_operators_refuse_forward_mode",
        ),
        Fault(
            "a norm with ReLU is a batch norm to tools",
            "esper/ops/norm_relu_pool.py",
            "class NormReluPool(_NormBase):",
            "class NormReluPool(nn.BatchNorm2d):",
            "tests/ops/test_norm_relu_pool_module.py::"
            "test_tools_that_replace_norms_drop_neither_relu_nor_pool",
        ),
        Fault(
            "a pickle of accumulators has views of nothing",
            "esper/ops/accumulators.py",
            "        self._view(*state)",
            "        self._view(state[0].clone(), *state[1:])\n        self._buffer = state[0]",
            "tests/ops/test_accumulators.py::test_copies_read_what_is_added_to_them",
        ),
        Fault(
            "training stays in the caller's inference mode",
            "esper/ops/torch_state.py",
            "        stack.enter_context(torch.inference_mode(False))\n",
            "",
            "tests/ops/test_torch_state.py::"
            "test_training_has_its_own_state_and_the_caller_gets_its_own_back",
        ),
        Fault(
            "the caller's data type is not restored",
            "esper/ops/torch_state.py",
            "            stack.callback(torch.set_default_dtype, dtype)\n",
            "",
            "tests/ops/test_torch_state.py::"
            "test_training_has_its_own_state_and_the_caller_gets_its_own_back",
        ),
        Fault(
            "a shell's tilde names a folder",
            "esper/config/given.py",
            "        path = os.path.expanduser(value)",
            "        path = str(value)",
            "tests/config/test_given.py::test_a_tilde_is_the_home_folder_and_only_in_front",
        ),
        Fault(
            "a device that no machine has is found out when torch is loaded",
            "esper/config/types.py",
            '        if not re.fullmatch(r"cpu|cuda(:\\d+)?", name.strip()):\n',
            "        if False:\n",
            "tests/config/test_types.py::test_a_device_has_a_known_name",
        ),
        Fault(
            "the user's style reaches charts",
            "esper/show/charts.py",
            "        matplotlib.rcdefaults()",
            "        pass",
            "tests/show/test_charts.py::test_the_users_style_neither_changes_a_chart_nor_is_changed",
        ),
    ],
}
