"""Mutants of layers that grow and shrink, and of several decisions before an epoch."""

from __future__ import annotations

from tests.fault import Fault

EDITS = "tests/env/test_edits.py::test_"
MERGING = "tests/env/test_merging.py::test_"
SHRINKING = "tests/env/test_shrinking.py::test_"
LAYERS = "tests/training/test_merging.py::test_"

MUTANTS: dict[str, list[Fault]] = {
    "several decisions": [
        Fault(
            "the last edit does not train",
            "esper/env/epoch_loop.py",
            "            trains: Bools = active & (~edits | used_up)\n",
            "            trains: Bools = active & ~edits\n",
            f"{EDITS}the_last_edit_trains",
        ),
        Fault(
            "an edit trains",
            "esper/env/epoch_loop.py",
            "            trains: Bools = active & (~edits | used_up)\n",
            "            trains: Bools = active | used_up\n",
            f"{EDITS}an_edit_returns_at_once_and_its_env_stands_still",
        ),
        Fault(
            "edits of an epoch count for the next one",
            "esper/env/epoch_loop.py",
            "        state.write(active, edits=0)\n",
            "        pass\n",
            f"{EDITS}the_last_edit_trains",
        ),
        Fault(
            "a slot is acted on twice before an epoch",
            "esper/core/legal.py",
            "    op_slot &= ~slots.edited[:, None]\n",
            "    pass\n",
            f"{EDITS}a_slot_is_acted_on_once_before_an_epoch",
        ),
        Fault(
            "a slot stays closed after the epoch",
            "esper/env/epoch_loop.py",
            "        state.slots.write(active[:, None], edited=False)\n",
            "        pass\n",
            f"{EDITS}a_slot_is_acted_on_once_before_an_epoch",
        ),
        Fault(
            "what the edits of an epoch cost is paid again",
            "esper/env/slot_env.py",
            "            self.state.edit_reward[trained] = 0.0\n",
            "            pass\n",
            f"{EDITS}an_epoch_is_reported_once_with_all_that_its_decisions_cost",
        ),
    ],
    "merges in training": [
        Fault(
            "a host merges while an anomaly is pending",
            "esper/env/epoch_loop.py",
            "state.trained & ~state.done & ~state.anomaly_pending",
            "state.trained & ~state.done",
            f"{MERGING}a_host_stays_as_it_is_while_an_anomaly_is_pending",
        ),
        Fault(
            "a rollback after a merge finds other layers",
            "esper/env/epoch_loop.py",
            "        loop.backend.rebase(np.any(where, axis=1), state)\n",
            "        pass\n",
            f"{MERGING}a_rollback_keeps_what_was_merged",
        ),
        Fault(
            "new units that never trained begin with outputs of zero",
            "esper/hosts/widen.py",
            "    columns.copy_(torch.cat(",
            "    (torch.cat(",
            "tests/hosts/test_widen.py::test_units_that_never_trained_add_nothing_and_all_learn_in_the_first_step",
        ),
        Fault(
            "widenings of the start stay beside their layers for an epoch",
            "esper/env/epoch_loop.py",
            "        first = trains & (self.state.epoch == 0)\n",
            "        first = trains & (self.state.epoch < 0)\n",
            "tests/env/test_merging.py::test_widenings_before_the_first_epoch_are_in_their_layers_when_it_trains",
        ),
        Fault(
            "a budget forgets what was merged",
            "esper/core/slots.py",
            "        return np.asarray((self.parameters + self.merged_parameters).sum(axis=1))\n",
            "        return np.asarray(self.parameters.sum(axis=1))\n",
            f"{MERGING}budgets_and_caps_count_what_was_merged",
        ),
        Fault(
            "merged parameters begin without averages",
            "esper/training/merging.py",
            "                merged = averages.get(key, {}).get(at, earlier.get(key))\n",
            "                merged = averages.get(key, {}).get(at)\n",
            f"{LAYERS}a_merged_widening_computes_the_same_and_keeps_its_momentum",
        ),
        Fault(
            "frozen layers take up seeds that learn",
            "esper/training/merging.py",
            '        frozen = training.config.task.freeze != "nothing"\n',
            "        frozen = False\n",
            f"{LAYERS}layers_of_a_frozen_host_take_up_nothing",
        ),
        Fault(
            "a seed that is linear in a layer is merged at another alpha",
            "esper/training/merging.py",
            "        merge_linear(seed, alpha, layer)\n",
            "        merge_linear(seed, 0.5 * alpha, layer)\n",
            f"{LAYERS}a_grafted_network_takes_up_what_is_linear_in_a_layer",
        ),
        Fault(
            "rule need ends where all layers have just grown",
            "esper/agents/heuristic.py",
            "        if vacant and not self.measured[env]:\n",
            '        if vacant and not any(view.slot(slot, "need_measured") for slot in slots):\n',
            "tests/agents/test_need.py::test_it_waits_for_the_need_of_layers_that_have_all_just_grown",
        ),
    ],
    "shrink": [
        Fault(
            "units that are taken out are the first ones",
            "esper/hosts/shrink.py",
            '            taken[f"{number}.{name}"] = old[kept:].clone()\n'
            "            replace_tensor(layer, name, old[:kept].clone())\n",
            '            taken[f"{number}.{name}"] = old[:units].clone()\n'
            "            replace_tensor(layer, name, old[units:].clone())\n",
            "tests/hosts/test_shrink.py::test_taken_units_compute_what_is_missing",
        ),
        Fault(
            "units that fade have lost their weights",
            "esper/training/merging.py",
            "    body.load_state_dict({**body.state_dict(), **state})\n",
            "    pass\n",
            f"{SHRINKING}the_host_computes_the_same_when_its_units_begin_to_fade",
        ),
        Fault(
            "units that are taken out stay in the list of merges",
            "esper/training/merging.py",
            "    growth = training.growths[slot].pop()\n",
            "    growth = training.growths[slot][-1]\n",
            f"{SHRINKING}pruned_units_fade_and_leave_their_layers",
        ),
        Fault(
            "what is left of a layer forgets its averages",
            "esper/training/merging.py",
            "        groups,\n        rest,\n",
            "        groups,\n        {},\n",
            f"{LAYERS}units_that_are_taken_out_and_merged_again_leave_their_host_as_it_was",
        ),
        Fault(
            "a resumed host has its first layers",
            "esper/training/host_state.py",
            '    training.take_layers(state["layers"])',
            "    training.take_layers({})",
            f"{SHRINKING}a_resumed_host_that_shrinks_to_its_first_layers_has_its_first_sizes",
        ),
        Fault(
            "sizes of a resumed host are those of a grown one",
            "esper/env/merging.py",
            "            self._first = self.catalog.at(new.sites).choices(\n",
            "            self._first = self.catalog.choices(\n",
            f"{SHRINKING}a_resumed_host_that_shrinks_to_its_first_layers_has_its_first_sizes",
        ),
    ],
    "ranks and wider layers": [
        Fault(
            "a LoRA of a frozen layer changes the frozen weights",
            "esper/hosts/widen.py",
            "    if beside:\n",
            "    if False:\n",
            "tests/core/blueprints/test_adapted.py::test_the_rank_of_a_frozen_layer_grows_in_one_slot",
        ),
        Fault(
            "a frozen layer needs a LoRA for what its weights cannot change",
            "esper/hosts/need.py",
            "loss * (1 - share if _changes_weights(place) else share)",
            "loss * share",
            "tests/hosts/test_need.py::test_a_frozen_layer_needs_a_lora_for_what_its_weights_could_change",
        ),
        Fault(
            "hosts that merge are offered what fitted their first widths",
            "esper/env/vector_env.py",
            "grows=bool(config.env.merge),",
            "grows=False,",
            "tests/env/test_merging.py::test_a_blueprint_that_fits_only_a_wider_layer_may_be_planted_once_it_is_wider",
        ),
        Fault(
            "the statistics of a BatchNorm stay those of a trial pass",
            "esper/hosts/example.py",
            "self._tensor._version != self._version or _differ(self._tensor, self._before)",
            "self._tensor._version != self._version",
            "tests/hosts/test_example.py::test_statistics_of_a_batch_norm_are_restored_after_a_training_pass",
        ),
    ],
}
