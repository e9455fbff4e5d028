"""Kept seeds of a loop become a part of its layers between two epochs, and their slots grow again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import esper
from esper.config import ConfigError
from esper.core.action import Op
from esper.grower.merging import refuse_merges
from esper.hosts.seed_hook import hooks_of
from tests.grower.loops import (
    LENIENT,
    Loop,
    X,
    Y,
    do,
    net,
    plain,
    plant,
    same,
    scores,
    script,
    weights,
)
from tests.grower.test_sources import outputs
from tests.selection import slow_except

WIDEN = {"r2c0": "body.0 -> body.2"}
AT_ONCE = LENIENT.with_values(env={"at_once": True}, task={"max_grad_norm": 1e9})
THRICE = {1: plant("r2c0", "widen_half"), 3: plant("r2c0", "widen_quarter")}
THRICE[6] = plant("r2c0", "widen_half")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.001, momentum=0.5),
    "Adam": lambda p: torch.optim.Adam(p, 1e-4),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-4),
}


def merging(actions: Any = None, sites: Any = WIDEN, **arguments: Any) -> Loop:
    arguments = {"config": AT_ONCE, "epochs": 12, "merge": True, **arguments}
    return Loop(sites=sites, controller=script(actions or THRICE), **arguments)


def test_a_kept_seed_becomes_a_part_of_the_layers_and_its_slot_grows_again() -> None:
    loop = merging().run()
    assert loop.model.body[0].out_features == 12 + 6 + 4 + 11
    assert loop.grower.merged == {"r2c0": ("widen_half", "widen_quarter", "widen_half")}
    assert loop.grower.kept == {}
    assert "merged widen_half in r2c0" in str(loop.steps[2])
    assert loop.steps[-1].slots["r2c0"].merges == 3
    state = loop.grower.env.state.slots
    grown = (
        sum(p.numel() for p in loop.model.parameters())
        - loop.grower.env.host_parameters
    )
    assert state.merged_parameters[0, 0] == grown
    wanted = outputs(loop.model)
    model = loop.grower.finish()
    assert not list(hooks_of(model))
    assert type(model) is type(net())
    assert torch.equal(outputs(model), wanted)


def test_parameters_stay_the_same_objects_and_the_optimizer_goes_on_with_them() -> None:
    model = net()
    held = list(model.parameters())
    loop = merging(model=model).run()
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    (group,) = loop.optimizer.param_groups
    assert all(a is b for a, b in zip(held, group["params"], strict=True))
    for parameter in held:
        state = loop.optimizer.state[parameter]
        assert state["momentum_buffer"].shape == parameter.shape


def test_a_loss_of_the_last_batch_that_is_still_there_does_not_stop_the_next_epoch() -> (
    None
):
    kept: list[Tensor] = []

    def step(loop: Loop, x: Tensor, y: Tensor) -> None:
        loss = nn.functional.cross_entropy(loop.model(x), y)
        loop.optimizer.zero_grad()
        loss.backward()
        loop.optimizer.step()
        kept[:] = [loss]

    assert merging(step=step).run().grower.merged


def whole_batch(loop: Loop, _x: Tensor, _y: Tensor) -> None:
    """A step on all samples, whose gradient hardly changes from step to step."""
    loop.optimizer.zero_grad()
    nn.functional.cross_entropy(loop.model(X.to(loop.model.head.weight)), Y).backward()
    loop.optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_next_update_is_that_of_the_seed_beside_its_layers(name: str) -> None:
    """It is the same but for rounding, unless the optimizer corrects its averages by a count of steps."""
    units = []
    for merge in (True, False):
        loop = merging(
            {3: plant("r2c0", "widen_half")},
            make_optimizer=OPTIMIZERS[name],
            model=net().double(),
            step=whole_batch,
            merge=merge,
            epochs=8,
        )
        loop.model.forward = lambda x, m=loop.model: m.head(
            m.dropout(m.body(x.double()))
        )
        loop.run(5)
        assert bool(loop.grower.merged) is merge

        def widened(loop: Loop = loop, merge: bool = merge) -> Tensor:
            body = loop.model.body
            if merge:
                parts = [body[0].weight[12:], body[0].bias[12:], body[2].weight[:, 12:]]
            else:
                parts = list(loop.grower.hooks.sites["r2c0"].seed.parameters())
            return torch.cat([part.detach().flatten() for part in parts])

        before = widened().clone()
        whole_batch(loop, X, Y)
        units.append(widened() - before)
    exact = name in ("SGD", "RMSprop")
    tolerance = 1e-9 if exact else 0.1 * units[1].abs().max().item()
    torch.testing.assert_close(units[0], units[1], rtol=0, atol=tolerance)


def saved_of(loop: Loop) -> Any:
    return copy.deepcopy(
        [
            loop.grower.state_dict(),
            loop.model.state_dict(),
            loop.optimizer.state_dict(),
        ]
    )


def resumed(saved: Any, epoch: int, loop: Loop) -> Loop:
    """Continues in a new ``loop`` from a saved state, loaded from a file."""
    loop.grower.load_state_dict(saved[0])
    loop.model.load_state_dict(saved[1])
    loop.optimizer.load_state_dict(saved[2])
    loop.epoch = epoch
    return loop


def breaks(loop: Loop, x: Tensor, y: Tensor) -> None:
    """A step whose weights are not finite in one epoch."""
    plain(loop, x, y)
    if loop.epoch == 5:
        with torch.no_grad():
            loop.model.head.weight.fill_(torch.nan)


@pytest.mark.parametrize(
    ("name", "epochs"), slow_except([("AdamW", 7)], [("SGD", 4), ("AdamW", 7)])
)
def test_a_loop_that_has_merged_goes_on_from_its_state_with_the_same_bits(
    name: str, epochs: int, tmp_path: Any
) -> None:
    """It grows three times, is rolled back once, and is stopped before that or after it."""
    arguments: Any = {
        "make_optimizer": OPTIMIZERS[name],
        "governor": True,
        "step": breaks,
    }
    whole = merging(**arguments).run()
    stopped = merging(**arguments).run(epochs)
    torch.save(saved_of(stopped), tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    loop = resumed(saved, epochs, merging(**arguments)).run()
    assert whole.steps[5].rollback is not None
    assert len(whole.grower.merged["r2c0"]) == 3
    assert loop.grower.merged == whole.grower.merged
    assert str(loop.steps[-1]) == str(whole.steps[-1])
    states = [saved_of(each)[2]["state"].values() for each in (loop, whole)]
    for one, other in zip(*states, strict=True):
        for key, value in one.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[key])), key
    models = [each.grower.finish() for each in (loop, whole)]
    assert same(weights(models[0]), weights(models[1]))
    torch.save(models[0], tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    modules = esper.plain(loaded, X).modules()
    assert {type(module).__module__.split(".")[0] for module in modules} <= {
        "torch",
        "tests",
    }
    exported = torch.export.export(loaded.eval(), (X,)).module()
    torch.testing.assert_close(exported(X), outputs(models[1]))


def test_a_rollback_keeps_what_was_merged() -> None:
    loop = merging({1: plant("r2c0", "widen_half")}, governor=True).run(4)
    wanted = weights(loop.model)
    with torch.no_grad():
        loop.model.head.weight.fill_(float("nan"))
    loop.train()
    step = loop.grower.step(lambda model: float(torch.isfinite(outputs(model)).all()))
    assert step.rollback is not None
    assert loop.model.body[0].out_features == 18
    assert all(
        bool(torch.isfinite(value).all()) for value in weights(loop.model).values()
    )
    assert wanted.keys() == weights(loop.model).keys()
    loop.epoch = 5
    loop.run()
    assert loop.grower.finish().body[0].out_features == 18


def test_averages_that_follow_the_model_are_merged_too() -> None:
    model = net()
    average = AveragedModel(model)

    def step(loop: Loop, x: Tensor, y: Tensor) -> None:
        nn.functional.cross_entropy(loop.model(x), y).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        average.update_parameters(loop.model)

    loop = merging(model=model, averages=[average], step=step).run()
    assert average.module.body[0].weight.shape == model.body[0].weight.shape
    loop.grower.finish()
    assert bool(torch.isfinite(outputs(average)).all())
    assert not list(hooks_of(average.module))


def test_an_average_that_does_not_follow_fails_and_is_not_taken_for_the_model() -> None:
    average = AveragedModel(net())

    def step(loop: Loop, x: Tensor, y: Tensor) -> None:
        whole_batch(loop, x, y)
        average.update_parameters(loop.model)

    with pytest.raises(RuntimeError, match="size"):
        merging(step=step).run()


def test_parameters_that_another_optimizer_may_train_keep_the_seed_beside() -> None:
    model = net()
    others = torch.optim.SGD(model.body[2].parameters(), 0.1)
    held = set(model.body[2].parameters())

    def step(loop: Loop, x: Tensor, y: Tensor) -> None:
        others.zero_grad()
        whole_batch(loop, x, y)
        others.step()

    loop = merging(
        {1: plant("r2c0", "widen_half")},
        model=model,
        step=step,
        make_optimizer=lambda all_parameters: torch.optim.SGD(
            [p for p in all_parameters if p not in held], 0.1
        ),
    ).run()
    assert loop.grower.kept == {"r2c0": "widen_half"}
    assert loop.steps[-1].slots["r2c0"].stays.startswith("body.2.weight is not in the")


def test_a_frozen_layer_keeps_the_seed_beside() -> None:
    model = net()
    model.body[0].requires_grad_(False)
    loop = merging({1: plant("r2c0", "widen_half")}, model=model).run()
    assert "body.0.weight is frozen" in loop.steps[-1].slots["r2c0"].stays


def test_a_state_that_is_no_average_of_gradients_keeps_the_seed_beside() -> None:
    loop = merging(
        {1: plant("r2c0", "widen_half")},
        make_optimizer=lambda p: torch.optim.ASGD(p, 0.05),
    ).run()
    assert "what ASGD keeps of" in loop.steps[-1].slots["r2c0"].stays


def test_a_seed_with_a_rate_of_its_own_merges_when_its_rate_is_that_of_its_layers() -> (
    None
):
    arguments: Any = {"actions": {1: plant("r2c0", "widen_half")}}
    rising = merging(warmup_steps=9, **arguments).run()
    merges = [step.slots["r2c0"].merges for step in rising.steps]
    assert merges.index(1) == 4, "after three epochs of four steps"
    other = merging(lr_factor=2.0, **arguments).run()
    assert "2 times that of its layers" in other.steps[-1].slots["r2c0"].stays


def test_momentum_that_a_schedule_changes_is_that_of_the_seeds_too() -> None:
    seen = []

    def step(loop: Loop, x: Tensor, y: Tensor) -> None:
        whole_batch(loop, x, y)
        seen.append([group["momentum"] for group in loop.optimizer.param_groups])

    merging(
        {1: plant("r2c0", "widen_half")},
        merge=False,
        step=step,
        make_scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=60
        ),
    ).run()
    assert len(seen[-1]) == 2
    assert all(len(set(momenta)) == 1 for momenta in seen)


def test_a_linear_seed_becomes_a_part_of_its_layer() -> None:
    actions = {
        0: plant("r0c0", "lora"),
        1: do(Op.ADVANCE, "r0c0"),
        4: do(Op.ADVANCE, "r0c0"),
        8: do(Op.ADVANCE, "r0c0"),
        9: do(Op.FOSSILIZE, "r0c0"),
    }
    loop = merging(actions, {"r0c0": "body.0"}, config=LENIENT, epochs=14).run()
    assert loop.grower.merged == {"r0c0": ("lora",)}
    assert not list(hooks_of(loop.grower.finish()))


def test_kept_seeds_stay_beside_by_default() -> None:
    loop = merging({1: plant("r2c0", "widen_half")}, merge=False).run()
    assert loop.grower.kept == {"r2c0": "widen_half"}
    assert loop.grower.merged == {}


def test_budgets_count_what_was_merged() -> None:
    config = AT_ONCE.with_values(env={"parameter_budget": 0.9})
    loop = merging(
        {number: plant("r2c0", "widen_half") for number in range(1, 9)}, config=config
    ).run()
    bare = sum(p.numel() for p in net().parameters())
    grown = sum(p.numel() for p in loop.model.parameters())
    assert 1.3 * bare < grown <= 1.9 * bare


class Blocks(nn.Module):
    """Two blocks and a head for images, sequences [N, C, T], or rows, with the layers of one of these kinds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        layer, norm = {
            "mlp": (nn.Linear, nn.BatchNorm1d),
            "cnn": (partial(nn.Conv2d, kernel_size=3, padding=1), nn.BatchNorm2d),
            "cnn1d": (partial(nn.Conv1d, kernel_size=3, padding=1), nn.BatchNorm1d),
        }[kind]
        self.shape = {"mlp": (8,), "cnn": (2, 2, 2), "cnn1d": (2, 4)}[kind]
        self.one = nn.Sequential(layer(self.shape[0], 6), norm(6), nn.ReLU())
        self.two = layer(6, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.two(self.one(x.view(-1, *self.shape)))
        return self.head(torch.relu(h).flatten(2).mean(2) if h.dim() > 2 else h)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "sink", "merge"),
    [("mlp", "one", False), ("cnn", "one", True), ("cnn1d", "one.0", False)],
)
def test_a_seed_inside_a_layer_that_grows_keeps_its_channels(
    kind: str, sink: str, merge: bool, tmp_path: Any
) -> None:
    """It is planted before the layer grows, lives while it grows, and is kept; the layer grows twice."""
    torch.manual_seed(0)
    residual = "mlp_small" if kind == "mlp" else "depthwise"
    actions = {
        0: plant("r0c0", residual),
        1: plant("r2c0", "widen_half"),
        2: do(Op.ADVANCE, "r0c0"),
        5: do(Op.ADVANCE, "r0c0"),
        6: plant("r2c0", "widen_half") if merge else do(Op.WAIT, "r2c0"),
        9: do(Op.ADVANCE, "r0c0"),
        10: do(Op.FOSSILIZE, "r0c0"),
    }
    loop = merging(
        actions,
        {"r2c0": "one.0 -> two", "r0c0": sink},
        model=Blocks(kind),
        topology=None,
        config=AT_ONCE.with_values(env={"one_incubating": False}),
        merge=merge,
        epochs=14,
    ).run()
    assert loop.grower.kept.get("r0c0") == residual
    wanted = outputs(loop.model)
    with pytest.warns(UserWarning, match=f"not merged and stay modules: {sink}:"):
        model = loop.grower.finish(merge=True)
    assert model.one[1].num_features == 6 + 3 + 4 * merge
    torch.testing.assert_close(outputs(model), wanted)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    plain = esper.plain(loaded, X)
    torch.testing.assert_close(outputs(plain), wanted)
    exported = torch.export.export(plain.eval(), (X,), strict=False).module()
    torch.testing.assert_close(exported(X), wanted)


def test_a_widening_around_an_activation_with_a_seed_has_the_activation_alone() -> None:
    actions = {
        0: plant("r0c0", "mlp_small"),
        1: do(Op.ADVANCE, "r0c0"),
        4: do(Op.ADVANCE, "r0c0"),
        8: do(Op.ADVANCE, "r0c0"),
        9: do(Op.FOSSILIZE, "r0c0"),
        10: plant("r2c0", "widen_half"),
    }
    loop = merging(actions, {**WIDEN, "r0c0": "body.1"}, epochs=14).run()
    site = loop.grower.hooks.sites["r2c0"]
    assert loop.grower.kept == {"r0c0": "mlp_small"}
    assert loop.grower.merged == {"r2c0": ("widen_half",)}
    assert site.seed is None
    assert loop.model.body[0].out_features == 18
    assert loop.grower.hooks.sites["r0c0"].seed.leading == 12


def test_a_trainer_of_a_library_is_refused() -> None:
    refuse_merges({"config": {"env": {"merge": False}}, "governor": True})
    with pytest.raises(ConfigError, match=r"env\.merge does not work in a Trainer"):
        refuse_merges({"config": {"env": {"merge": True}}})


def test_changes_of_a_layers_weights_are_merged_again_and_again() -> None:
    actions = {number: plant("r3c0", "lora_2") for number in (1, 3, 5)}
    loop = merging(actions, {"r3c0": "body.2 -> body.2"}, epochs=8).run()
    assert loop.grower.merged == {"r3c0": ("lora_2",) * 3}
    assert weights(loop.model).keys() == weights(net()).keys()
    assert not list(hooks_of(loop.grower.finish()))


def test_hooks_of_vacant_sites_rest_after_the_first_pass_of_an_epoch() -> None:
    loop = merging({1: plant("r2c0", "widen_half")}, epochs=8).run(5)
    layers = [loop.model.body[0], loop.model.body[2], loop.model.body]
    assert any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
    loop.train()
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
    assert len(list(hooks_of(loop.model))) == 1
    with pytest.raises(ConfigError, match="another Grower grows this model"):
        esper.Grower(loop.model, ["body.2"], loop.optimizer)


def test_a_copy_that_was_made_while_hooks_rest_is_known_at_the_end() -> None:
    loop = Loop(
        controller=script(
            {
                0: plant("r0c0"),
                **{n: do(Op.ADVANCE, "r0c0") for n in (1, 4, 8)},
                9: do(Op.FOSSILIZE, "r0c0"),
            }
        )
    )
    loop.train()
    copied = AveragedModel(loop.model)
    loop.steps.append(loop.grower.step(scores))
    loop.run()
    with pytest.warns(UserWarning, match="no seed in slot r0c0"):
        loop.grower.finish()
    assert copied.n_averaged == 0


@pytest.mark.parametrize("stopped", [False, True])
def test_widenings_at_the_start_are_in_their_layers_before_the_first_step(
    stopped: bool,
) -> None:
    """The model computes the same, and its new units all learn in the first step."""
    actions = {0: plant("r2c0", "widen_whole")}
    loop = merging(actions, early=True, epochs=4)
    wanted = outputs(loop.model)
    loop.run(0)
    assert loop.model.body[0].out_features == 24
    assert loop.grower.merged == {"r2c0": ("widen_whole",)}
    torch.testing.assert_close(outputs(loop.model), wanted)
    (layer,) = loop.grower.summary().layers
    assert (layer.before, layer.after) == (12, 24)
    if stopped:
        saved = saved_of(loop)
        loop = resumed(saved, 0, merging(actions, epochs=4))
    before = loop.model.body[0].weight.detach().clone()
    loop.early = False
    loop.run(1)
    moved = (loop.model.body[0].weight - before)[12:].abs().amax(dim=1)
    assert (moved > 0).float().mean() > 0.5  # a ReLU may be dead
