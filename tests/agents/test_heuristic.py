"""The heuristic: it plants early, blends what its trial shows to help, keeps what contributes, replaces the rest."""

import pytest

from esper.agents.heuristic import HeuristicController
from esper.config import TrainingConfig
from tests.agents.control_helpers import LAYOUT, SPEC, S, World

# Of 150 epochs, the rule gives a seed 24 to show a gain; G2 requires 10, and a ramp takes 5.
LATE = 24


def heuristic(**settings: float) -> HeuristicController:
    config = TrainingConfig.parse({"heuristic": settings})
    made = HeuristicController(SPEC, LAYOUT, 1, config=config)
    made.begin()
    return made


def planted(
    stage: S, epoch: int = 50, in_stage: int = 0, slot: str = "r0c0", **values: float
) -> World:
    """A world with a seed of `conv_light` in this stage whose next gate would open; accuracies in pp."""
    world = World()
    world.plateau(epoch)
    tenths = {name: value / 10 for name, value in values.items()}
    seed = {
        "gate_passed": 1.0,
        "blueprint": 2.0,
        "epochs_in_stage": in_stage / LAYOUT.horizon,
    }
    world.put(slot, stage, age=in_stage, **seed, **tenths)
    return world


def test_the_heuristic_plants_at_once_and_not_in_the_last_third() -> None:
    for epoch, op in ((0, "GERMINATE"), (105, "GERMINATE"), (106, "WAIT")):
        world = World()
        world.plateau(epoch)
        assert world.ask(heuristic())[0] == op


def test_the_heuristic_plants_nothing_that_could_not_be_kept() -> None:
    """GERMINATED takes an epoch, TRAINING 10 and a ramp 5, and another epoch is needed to keep the seed."""
    for left, op in ((17, "GERMINATE"), (16, "WAIT")):
        world = World()
        world.plateau(LAYOUT.horizon - left)
        assert world.ask(heuristic(latest=1.0))[0] == op


@pytest.mark.parametrize(
    ("share", "order"), [(0.0, "dcan"), (1.0, "nacd"), (0.66, "acnd")]
)
def test_the_heuristic_chooses_by_the_size_of_seeds_in_the_slot(
    share: float, order: str
) -> None:
    """Depthwise is the smallest seed here, then conv_light, attention and norm, unlike in their registration."""
    world, rule = World(), heuristic(size=share)
    world.size[0] = [0.9, 0.4, 0.3, 0.5]  # of norm, conv_light, depthwise and attention
    planted = []
    for _ in order:
        planted.append(world.ask(rule)[2][0])
        rule.failed[0].append(
            ["r0c0", next(name for name in SPEC.blueprints if name[0] == planted[-1])]
        )
        rule.failed[0] += [
            [slot, name] for slot in SPEC.slots[1:] for name in SPEC.blueprints
        ]
    assert "".join(planted) == order


def test_the_heuristic_plants_first_what_is_a_part_of_the_host_at_once() -> None:
    """It needs no epochs for a trial, so that it is planted later than any other, too, before the last third."""
    world, rule = World(), heuristic(latest=1.0)
    world.at_once[1] = [0.0, 1.0, 0.0, 1.0]
    world.size[1] = [0.9, 0.4, 0.5, 0.3]
    world.plateau(LAYOUT.horizon - 2)
    assert world.ask(rule) == ("GERMINATE", "r0c1", "conv_light")  # the largest of them
    world.put("r0c1", S.FOSSILIZED)
    assert world.ask(rule)[0] == "WAIT"
    world.plateau(0)
    assert world.ask(rule)[:2] == ("GERMINATE", "r0c0")


def test_the_heuristic_chooses_by_size_among_the_blueprints_that_fit_in_the_slot() -> (
    None
):
    """Those that do not fit have a size of 0, and do not count."""
    world = World(offered=(("norm", "depthwise"), SPEC.blueprints, SPEC.blueprints))
    world.size[0] = [0.3, 0.0, 0.2, 0.0]
    for share, name in ((1.0, "norm"), (0.66, "norm"), (0.0, "depthwise")):
        config = TrainingConfig.parse({"heuristic": {"size": share}})
        rule = HeuristicController(world.spec, world.layout, 1, config=config)
        rule.begin()
        assert world.ask(rule) == ("GERMINATE", "r0c0", name)


def test_the_heuristic_waits_until_the_gate_would_open() -> None:
    for stage in (S.GERMINATED, S.TRAINING, S.BLENDING):
        world = planted(stage, slot="r0c1", trial=2.0, trial_error=0.5)
        assert world.ask(heuristic())[:2] == ("ADVANCE", "r0c1")
        world.slots["r0c1"]["gate_passed"] = 0.0
        assert world.ask(heuristic())[:2] != ("ADVANCE", "r0c1")


@pytest.mark.parametrize(
    ("trial", "blended", "doubly"),
    [(1.1, True, True), (0.9, True, False), (0.0, False, False)],
)
def test_the_heuristic_blends_a_seed_whose_trial_is_positive(
    trial: float, blended: bool, doubly: bool
) -> None:
    """The threshold may be a number of standard errors, here of 0.5 pp."""
    world = planted(S.TRAINING, in_stage=12, trial=trial, trial_error=0.5)
    assert (world.ask(heuristic())[0] == "ADVANCE") == blended
    assert (world.ask(heuristic(trial_errors=2.0))[0] == "ADVANCE") == doubly


def test_the_heuristic_blends_no_seed_that_could_not_be_kept() -> None:
    for left, op in ((6, "ADVANCE"), (5, "WAIT")):
        world = planted(
            S.TRAINING, LAYOUT.horizon - left, in_stage=12, trial=5.0, trial_error=1.0
        )
        assert world.ask(heuristic())[0] == op


def tried(*trials: float, error: float = 0.5, in_stage: int = 12) -> World:
    """A world with seeds in TRAINING in its first slots, with these trials, pp, and as many blueprints."""
    world = World()
    for place, (slot, trial) in enumerate(zip(SPEC.slots, trials, strict=False)):
        seed = {
            "gate_passed": 1.0,
            "blueprint": 1.0 + place,
            "epochs_in_stage": in_stage / LAYOUT.horizon,
        }
        world.put(
            slot,
            S.TRAINING,
            age=in_stage,
            trial=trial / 10,
            trial_error=error / 10,
            **seed,
        )
    return world


@pytest.mark.parametrize(
    ("shares", "slot"),
    [((1.0, 1.0, 1.0), "r0c1"), ((1.0, 4.0, 1.0), "r1c0"), ((0.2, 1.0, 1.0), "r0c0")],
)
def test_of_several_seeds_the_one_that_gains_most_for_its_price_is_blended_first(
    shares: tuple[float, ...], slot: str
) -> None:
    """Their trials are 1, 3 and 2 pp."""
    world = tried(1.0, 3.0, 2.0)
    for place, share in enumerate(shares):
        world.size_share[place, place] = share
    assert world.ask(heuristic())[:2] == ("ADVANCE", slot)


def test_a_seed_whose_gate_is_shut_or_whose_trial_is_running_is_not_compared() -> None:
    world = tried(1.0, 3.0, 2.0)
    world.slots["r0c1"]["gate_passed"] = 0.0
    assert world.ask(heuristic())[:2] == ("ADVANCE", "r1c0")


@pytest.mark.parametrize(
    ("trial", "strict", "op"),
    [(0.6, 1.0, "ADVANCE"), (0.4, 1.0, "PRUNE"), (0.4, 0.5, "ADVANCE")],
)
def test_of_several_seeds_one_that_does_not_gain_beyond_its_error_is_removed(
    trial: float, strict: float, op: str
) -> None:
    world = tried(3.0, trial)
    assert world.ask(heuristic(rival_errors=strict))[0] == op
    if op == "PRUNE":
        assert world.ask(heuristic())[:2] == ("PRUNE", "r0c1")


def test_a_seed_is_removed_for_a_rival_only_when_both_trials_are_over() -> None:
    """G2 requires ten epochs."""
    world = tried(3.0, 0.4)
    world.slots["r0c1"]["epochs_in_stage"] = 9 / LAYOUT.horizon
    assert world.ask(heuristic())[:2] == ("ADVANCE", "r0c0")
    world.slots["r0c1"]["epochs_in_stage"] = 10 / LAYOUT.horizon
    assert world.ask(heuristic())[:2] == ("PRUNE", "r0c1")


@pytest.mark.parametrize(
    ("in_stage", "trial", "op"),
    [
        (LATE, 0.0, "PRUNE"),
        (LATE - 1, 0.0, "WAIT"),
        (10, -1.6, "PRUNE"),
        (9, -1.6, "WAIT"),
        (10, -1.4, "WAIT"),
    ],
)
def test_the_heuristic_gives_up_a_seed_that_shows_no_gain(
    in_stage: int, trial: float, op: str
) -> None:
    """It waits for a while, but not if the trial is below −3 standard errors, here of 0.5 pp."""
    world = planted(S.TRAINING, in_stage=in_stage, trial=trial, trial_error=0.5)
    assert world.ask(heuristic())[0] == op


@pytest.mark.trap(27)
@pytest.mark.parametrize(
    ("contribution", "error", "kept"),
    [(0.6, 0.5, True), (0.4, 0.1, False), (2.0, 3.0, False), (0.0, 0.0, False)],
)
def test_the_heuristic_fossilizes_what_contributes(
    contribution: float, error: float, kept: bool
) -> None:
    """The contribution is above 0.5 pp and its standard error; after a while, and in the last epoch, above 0."""
    seed = {"slot": "r1c0", "contribution": contribution, "contribution_error": error}
    assert (
        planted(S.HOLDING, in_stage=3, **seed).ask(heuristic())[:2]
        == ("FOSSILIZE", "r1c0")
    ) == kept
    for epoch, in_stage in ((LAYOUT.horizon - 1, 3), (50, LATE)):
        decided = planted(S.HOLDING, epoch, in_stage, **seed).ask(heuristic())
        assert (decided[:2] == ("FOSSILIZE", "r1c0")) == (contribution > 0)


@pytest.mark.parametrize(
    ("in_stage", "contribution", "pruned"),
    [(3, -2.1, True), (3, -1.9, False), (23, 0.0, False)],
)
def test_the_heuristic_prunes_what_harms(
    in_stage: int, contribution: float, pruned: bool
) -> None:
    world = planted(
        S.HOLDING, in_stage=in_stage, contribution=contribution, contribution_error=2.0
    )
    assert (world.ask(heuristic())[:2] == ("PRUNE", "r0c0")) == pruned


def test_the_heuristic_leaves_no_seed_in_training_whose_gate_stays_shut() -> None:
    world = planted(S.TRAINING, in_stage=LATE, trial=5.0, trial_error=1.0)
    assert world.ask(heuristic())[0] == "ADVANCE"
    world.slots["r0c0"]["gate_passed"] = 0.0
    assert world.ask(heuristic())[:2] == ("PRUNE", "r0c0")


def test_the_heuristic_tries_another_slot_and_then_another_blueprint_after_a_failure() -> (
    None
):
    controller, world = heuristic(), World()
    failed = []
    for _ in range(6):
        _, slot, blueprint = world.ask(controller)
        world.put(
            slot,
            S.TRAINING,
            blueprint=1.0 + SPEC.blueprints.index(blueprint),
            epochs_in_stage=LATE / 150,
        )
        assert world.ask(controller)[:2] == ("PRUNE", slot)
        world.put(slot, S.DORMANT)
        failed.append((slot, blueprint))
    slots = list(SPEC.slots)
    assert failed == [(slot, "depthwise") for slot in slots] + [
        (slot, "attention") for slot in slots
    ]


def test_the_heuristic_plants_again_what_it_has_kept() -> None:
    controller = heuristic()
    world = planted(S.HOLDING, contribution=3.0, contribution_error=1.0)
    assert world.ask(controller)[:2] == ("FOSSILIZE", "r0c0")
    world.put("r0c0", S.FOSSILIZED, blueprint=2.0)
    assert world.ask(controller) == ("GERMINATE", "r0c1", "conv_light")
    controller.begin()
    assert world.ask(controller) == ("GERMINATE", "r0c1", "depthwise")


@pytest.mark.finding("M19")
@pytest.mark.parametrize("count", [1, 3, 4, 9])
def test_the_heuristic_fills_every_slot(count: int) -> None:
    """Hosts have any number of slots with any names; each slot is planted once."""
    slots = tuple(f"r{i % 2}c{i}" for i in range(count))
    world = World(slots)
    controller = HeuristicController(world.spec, world.layout, 1)
    controller.begin()
    life = {S.GERMINATED: S.TRAINING, S.TRAINING: S.BLENDING, S.BLENDING: S.HOLDING}
    planted = []
    for epoch in range(10, 15 + 6 * count):
        world.plateau(epoch)
        op, slot, blueprint = world.ask(controller)
        if op == "GERMINATE":
            planted.append(slot)
            index = 1.0 + SPEC.blueprints.index(blueprint)
            world.put(slot, S.GERMINATED, blueprint=index, gate_passed=1.0)
        elif op == "ADVANCE":
            stage = life[world.stage(slot)]
            world.put(
                slot,
                stage,
                age=9,
                blueprint=1.0,
                gate_passed=1.0,
                trial=0.2,
                contribution=0.2,
            )
        elif op == "FOSSILIZE":
            world.put(slot, S.FOSSILIZED, blueprint=1.0)
    assert sorted(planted) == sorted(slots)
    assert {world.stage(slot) for slot in slots} == {S.FOSSILIZED}
