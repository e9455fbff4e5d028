"""Faults in what finds where other people's networks can grow, and in what grows them."""

from __future__ import annotations

from tests.fault import Fault

MUTANTS: dict[str, list[Fault]] = {
    "other people's networks": [
        Fault(
            "the second run of a block has no seed",
            "esper/grower/sites.py",
            "        out = self._in_pass(site, at, training, first)\n",
            "        out = self._in_pass(site, at, training, first) if first else h\n",
            "tests/grower/test_sites.py::test_a_seed_on_a_layer_that_runs_several_times_acts_and_learns_in_each_run",
        ),
        Fault(
            "a seed learns from its last run in a pass only",
            "esper/grower/sites.py",
            "            if first:  # later features depend on the seed\n",
            "            if True:\n",
            "tests/grower/test_sites.py::test_a_seed_on_a_layer_that_runs_several_times_acts_and_learns_in_each_run",
        ),
        Fault(
            "a GradScaler that is switched off is asked for its states",
            "esper/grower/optimizer.py",
            "scaler if scaler is not None and scaler.is_enabled() else None",
            "scaler",
            "tests/grower/test_stepping.py::test_a_scaler_that_is_switched_off_is_as_none",
        ),
        Fault(
            "networks are compared in the products of training",
            "esper/hosts/example.py",
            "as_before(network) as gpus, full_products():",
            "as_before(network) as gpus:",
            "tests/hosts/test_example.py::test_a_pass_whose_outputs_are_compared_computes_products_in_full_precision",
        ),
        Fault(
            "a merged gated module counts new units in full",
            "esper/hosts/gated.py",
            'new.get_parameter("weight"), 1, alpha)',
            'new.get_parameter("weight"), 1, 1.0)',
            "tests/hosts/test_gated.py::test_more_units_are_those_of_a_wider_module",
        ),
        Fault(
            "units that depend on each other count as a gated module",
            "esper/hosts/gated.py",
            "            return gated if _adds_up(gated) else None\n",
            "            return gated\n",
            "tests/hosts/test_gated.py::test_other_modules_are_none",
        ),
        Fault(
            "the container of seeds counts as a part of the layer that it stands in",
            "esper/hosts/between.py",
            "or not own_children(module):",
            "or next(module.children(), None) is None:",
            "tests/grower/test_sources.py::"
            "test_the_last_layer_of_a_sequential_is_widened_though_seeds_are_registered_in_it",
        ),
        Fault(
            "an automatic site lies within a widening",
            "esper/hosts/find.py",
            'if site.kind != "residual" or _is_within(site.path, widened, order):',
            'if site.kind != "residual":',
            "tests/hosts/test_find.py::test_automatic_sites_are_few_and_none_lies_within_a_widening",
        ),
    ],
    "layouts": [
        Fault(
            "channels that come last are taken for positions",
            "esper/hosts/layout.py",
            "        return Layout(spatial[rank], (0, rank - 1, *range(1, rank - 1)))\n",
            "        return Layout(spatial[rank])\n",
            "tests/hosts/test_places.py::test_the_layout_of_each_site_is_found",
        ),
        Fault(
            "time that comes first is taken for samples",
            "esper/hosts/layout.py",
            'Layout("encoder", (1, 0, 2))',
            'Layout("encoder")',
            "tests/hosts/test_places.py::test_the_layout_of_each_site_is_found",
        ),
        Fault(
            "a causal model is taken for an encoder",
            "esper/hosts/layout.py",
            'topology = "transformer"',
            'topology = "encoder"',
            "tests/hosts/test_places.py::test_the_layout_of_each_site_is_found",
        ),
        Fault(
            "a delta comes back in the order of the seed",
            "esper/core/blend.py",
            "return delta.permute(self.back)",
            "return delta.permute(self.order)",
            "tests/core/test_topologies.py::test_features_in_another_order_get_the_same_delta_in_that_order",
        ),
        Fault(
            "a plain copy forgets the order of the dimensions",
            "esper/hosts/plain.py",
            "            f = f.permute(self.back)\n",
            "            pass\n",
            "tests/hosts/test_places.py::test_a_seed_grows_in_a_loop_and_stays_with_the_same_outputs",
        ),
        Fault(
            "a widening is listed although it does not merge",
            "esper/hosts/find.py",
            "if path not in staying]",
            "]",
            "tests/hosts/test_find.py::test_a_widening_that_does_not_merge_is_left_out",
        ),
        Fault(
            "a block that returns several shapes is listed",
            "esper/hosts/find.py",
            "if path and not run.changes and not final",
            "if path and not final",
            "tests/hosts/test_find.py::test_a_block_that_returns_several_shapes_is_no_place",
        ),
        Fault(
            "a list of modules is taken for one that runs",
            "esper/hosts/sources.py",
            "        if runs or not inner:\n",
            "        if True:\n",
            "tests/hosts/test_sources.py::test_a_source_and_a_sink_may_lie_in_a_list_of_modules",
        ),
    ],
}
