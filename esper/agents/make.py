"""Controllers by their command-line names, trained agents and a user's own among them."""

from __future__ import annotations

from esper.agents.controller import Controller
from esper.agents.names import make_controller
from esper.agents.own_controller import OwnController, make_own
from esper.agents.spec import SAVED, ControllerSpec
from esper.config import ConfigError, TrainingConfig
from esper.env.slot_env import SlotVectorEnv


def controller_for(
    controller: str | OwnController,
    config: TrainingConfig,
    env: SlotVectorEnv,
    run_seed: int,
) -> Controller:
    """Makes the controller with that name, a trained agent, or one of a user's own, for ``env``.

    Raises:
        ConfigError: the name is unknown (the known ones are listed), there is no trained agent at its path or it cannot
            play this host, ``ppo`` is named, which has to be trained first, or there is no such own controller.
    """
    spec = ControllerSpec.of(controller).check()
    if spec.is_code or spec.make is not None:
        return make_own(controller, env, run_seed)
    if spec.kind in SAVED:
        # Few loops follow a trained agent, and the others need not load what its file is read with.
        from esper.files.policy import find_policy

        return find_policy(spec.path or spec.name).controller(env, run_seed, greedy=spec.kind != "sampled")
    name = spec.name
    if spec.kind == "plans":
        _inform(env, spec.path)
        name = spec.kind
    return make_controller(
        name,
        config.task.name,
        env.action_spec,
        env.layout,
        env.num_envs,
        run_seed,
        config,
    )


def _inform(env: SlotVectorEnv, path: str) -> None:
    """Gives ``env`` the experience of the run at ``path``, if it is named.

    Raises ConfigError if the experience is of other hosts, or if there is none in an evaluation, where nothing could be
    planted.
    """
    if not path:
        if not env.gatherer.learns and env.gatherer.given is None:
            raise ConfigError(
                "plans plays what a run has learned of its seeds: name the run, as in plans:RUN_FOLDER; any run keeps "
                "its experience, and `esper run --controller plans` learns nothing else"
            )
        return
    # As in controller_for().
    from esper.files.misfits import MISFITS
    from esper.files.policy import find_policy

    experience = find_policy(path, without_policy=True).experience
    try:
        fits = env.gatherer.give(experience)
    except MISFITS as error:
        raise ConfigError(f"plans:{path} contains no experience that can be read: {error}") from None
    if not fits:
        raise ConfigError(
            f"plans:{path} knows slots {', '.join(experience['slots'])} and blueprints "
            f"{', '.join(experience['blueprints'])}; this host has {', '.join(env.action_spec.slots)} and "
            f"{', '.join(env.action_spec.blueprints)}"
        )
