"""Slots: named places in a host that can each hold one seed, and the state machine of that seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from esper.seeds.alpha import AlphaController, AlphaCurve
from esper.seeds.blend import BlendStyle, Seed
from esper.seeds.blueprints.registry import Blueprint
from esper.seeds.gate import GateEvidence, SeedMeasurements
from esper.seeds.stage import ADVANCES, BLENDED, COOLDOWN, LIVING, TRANSITIONS, SeedStage, check_transition


@dataclass(frozen=True)
class SlotSite:
    """The place of a slot: its name and the number of channels of its features."""

    name: str
    channels: int


@dataclass(frozen=True)
class StageChange:
    """A stage transition of a slot, passed to ``on_change``."""

    slot: str
    blueprint: str | None
    before: SeedStage
    after: SeedStage
    cause: str


class GerminationFailed(RuntimeError):
    """Raised if a blueprint does not fit a slot; the slot is unchanged."""


class SeedSlot:
    """One slot with its seed, alpha and clocks. Only the env ticks the clocks, once per epoch."""

    def __init__(self, site: SlotSite, embargo: int, on_change: Callable[[StageChange], None]) -> None:
        self.site = site
        self.cooldown_epochs = {SeedStage.PRUNED: 1, SeedStage.EMBARGOED: embargo, SeedStage.RESETTING: 1}
        self.on_change = on_change
        self._flags: WeakKeyDictionary[Seed, Tensor] = WeakKeyDictionary()
        self.clear()

    def clear(self) -> None:
        """Empties the slot at the start of an episode, without calling ``on_change``."""
        self.stage = SeedStage.DORMANT
        self._remove_seed()

    def _remove_seed(self) -> None:
        self.seed: Seed | None = None
        self.blueprint: Blueprint | None = None
        self.style: BlendStyle | None = None
        self.tempo = 0
        self.incubation_target = 0.0
        self.alpha = AlphaController()
        self.measured = SeedMeasurements()
        self.epochs_in_stage = 0
        self.age = 0
        self.fading = False
        # False once the seed had a non-finite value; lives on the device and is read once per epoch.
        self.finite: Tensor | None = None

    @property
    def name(self) -> str:
        return self.site.name

    @property
    def living(self) -> bool:
        return self.stage in LIVING

    @property
    def blended(self) -> bool:
        """True if the seed is in the forward pass with alpha above zero."""
        return self.stage in BLENDED and self.alpha.alpha > 0

    @property
    def incubating(self) -> bool:
        return self.stage is SeedStage.TRAINING

    @property
    def learning(self) -> bool:
        """True if the optimizer steps this seed: not in GERMINATED, and not while its alpha is falling."""
        return self.seed is not None and self.stage is not SeedStage.GERMINATED and not self.alpha.lowering

    @property
    def parameters(self) -> int:
        return 0 if self.seed is None else sum(p.numel() for p in self.seed.parameters())

    def evidence(self, anomaly_pending: bool) -> GateEvidence:
        return GateEvidence(self.stage, self.epochs_in_stage, self.alpha, self.measured, anomaly_pending)

    def germinate(
        self,
        blueprint: Blueprint,
        style: BlendStyle,
        tempo: int,
        target: float,
        probe: Tensor,
        prepare: Callable[[Seed], Seed] = lambda seed: seed,
    ) -> None:
        """Builds a seed, tries it on ``probe`` (features at this slot, [B, ...]), and plants ``prepare(seed)``.

        The blueprint's topology gives the layout of the features, see Seed. ``target`` and ``tempo`` (epochs) are the
        alpha target and length of the first ramp.

        Raises:
            GerminationFailed: the blueprint cannot be built or prepared, has no parameters to train, changes the shape
                or gives non-finite values. The slot is unchanged.
            IllegalTransition: the slot is not DORMANT.
        """
        check_transition(self.stage, SeedStage.GERMINATED)
        try:
            body = blueprint.build(self.site.channels)
            seed = Seed(body, style.operator, self.site.channels, blueprint.topology)
            seed.to(probe.device, torch.promote_types(probe.dtype, torch.float32))
            with torch.no_grad():
                delta = seed.eval()(probe)
            seed = prepare(seed)
        except Exception as error:  # a user's factory may raise anything; it must not end the run
            raise GerminationFailed(f"{blueprint.name} in {self.name}: {type(error).__name__}: {error}") from error
        if not any(parameter.requires_grad for parameter in seed.parameters()):
            raise GerminationFailed(f"{blueprint.name} in {self.name}: it has no parameters to train")
        if delta.shape != probe.shape:
            raise GerminationFailed(
                f"{blueprint.name} in {self.name} turns {tuple(probe.shape)} into {tuple(delta.shape)}; "
                "a seed keeps the shape"
            )
        if not bool(torch.isfinite(delta).all()):
            raise GerminationFailed(f"{blueprint.name} in {self.name}: its output is not finite")
        self._remove_seed()
        self.seed, self.blueprint, self.style = seed.train(), blueprint, style
        self.tempo, self.incubation_target = tempo, target
        self.finite = self._flag(seed, probe.device)
        self._enter(SeedStage.GERMINATED, "germinate")

    def _flag(self, seed: Seed, device: torch.device) -> Tensor:
        """Returns a bool scalar, True; a seed that is planted again gets the same memory."""
        if seed not in self._flags:
            self._flags[seed] = torch.ones((), dtype=torch.bool, device=device)
        return self._flags[seed].fill_(True)

    def advance(self, cause: str) -> None:
        """Moves to the next stage; entering BLENDING takes the first step of the ramp at once.

        The caller has evaluated the gate. Raises ValueError if ADVANCE does not apply to the current stage.
        """
        after = ADVANCES.get(self.stage)
        if after is None:
            raise ValueError(f"slot {self.name} is {self.stage.name}; ADVANCE applies to {[s.name for s in ADVANCES]}")
        if after is SeedStage.BLENDING:
            assert self.style is not None
            self._ramp(self.incubation_target, self.tempo, self.style.curve)
        self._enter(after, cause)

    def fossilize(self) -> None:
        self._enter(SeedStage.FOSSILIZED, "fossilize")

    def set_alpha_target(self, target: float, steps: int, curve: AlphaCurve) -> None:
        """Starts a new ramp; a target below 1 takes a seed from HOLDING back to BLENDING.

        Raises ValueError unless the stage is BLENDING or HOLDING and no ramp is running.
        """
        if self.stage not in (SeedStage.BLENDING, SeedStage.HOLDING):
            raise ValueError(f"slot {self.name} is {self.stage.name}; an alpha target is set in BLENDING or HOLDING")
        self._ramp(target, steps, curve)
        if self.stage is SeedStage.HOLDING and target < 1:
            self._enter(SeedStage.BLENDING, "set_alpha_target")

    def prune(self, steps: int, curve: AlphaCurve, cause: str) -> None:
        """Removes the seed: a blended one after fading to alpha 0 in ``steps`` epochs, otherwise at once."""
        if self.blended and steps > 0:
            self._ramp(0.0, steps, curve)
            self.fading = True
            if self.stage is SeedStage.HOLDING:
                self._enter(SeedStage.BLENDING, cause)
            if self.alpha.alpha > 0:
                return
        self.cut(cause)

    def cut(self, cause: str) -> None:
        """Removes the seed now and starts the cooldown."""
        check_transition(self.stage, SeedStage.PRUNED)
        self._drop(cause)

    def revoke_fossil(self) -> None:
        """Removes a fossil; only for a rollback to a snapshot that is older than it. Raises ValueError otherwise."""
        if self.stage is not SeedStage.FOSSILIZED:
            raise ValueError(f"slot {self.name} is {self.stage.name}, not FOSSILIZED")
        self._drop("rollback")

    def _drop(self, cause: str) -> None:
        assert self.blueprint is not None
        change = StageChange(self.name, self.blueprint.name, self.stage, SeedStage.PRUNED, cause)
        self.stage = SeedStage.PRUNED
        self._remove_seed()
        self.on_change(change)

    def tick(self) -> None:
        """Ends an epoch: moves alpha and the clocks, removes a faded seed, and advances the cooldown."""
        self.epochs_in_stage += 1
        if self.stage in COOLDOWN:
            if self.epochs_in_stage >= self.cooldown_epochs[self.stage]:
                (after,) = TRANSITIONS[self.stage]
                self._enter(after, "cooldown")
            return
        if self.seed is None:
            return
        self.age += 1
        self.alpha.tick()
        if self.fading and self.alpha.holding:
            self.cut("faded")

    def _ramp(self, target: float, steps: int, curve: AlphaCurve) -> None:
        self.alpha.retarget(target, steps, curve)
        self.alpha.advance()

    def _enter(self, stage: SeedStage, cause: str) -> None:
        check_transition(self.stage, stage)
        before, self.stage, self.epochs_in_stage = self.stage, stage, 0
        name = self.blueprint.name if self.blueprint else None
        self.on_change(StageChange(self.name, name, before, stage, cause))
