"""Controllers by their command-line names, trained agents and a user's own among them."""

from __future__ import annotations

from esper.config import ConfigError, TrainingConfig, did_you_mean
from esper.control.controller import Controller
from esper.control.names import NAMES as CONTROLLERS
from esper.control.names import make_controller
from esper.data.user_code import FORM, is_user_code
from esper.env.slot_env import SlotVectorEnv
from esper.rollout.own_controller import OwnController, make_own, name_of

NAMES = ("ppo", "checkpoint:PATH", "pretrained", *CONTROLLERS, FORM)


def controller_for(
    controller: str | OwnController,
    config: TrainingConfig,
    env: SlotVectorEnv,
    run_seed: int,
) -> Controller:
    """Makes the controller with that name, a trained agent that plays greedily, or one of a user's own, for ``env``.

    Raises:
        ConfigError: the name is unknown (the known ones are listed), there is no trained agent at its path or it cannot
            play this host, ``ppo`` is named, which has to be trained first, or there is no such own controller.
    """
    check_name(controller)
    if not isinstance(controller, str) or is_user_code(controller):
        return make_own(controller, env, run_seed)
    # The others are KIND or KIND:PATH.
    kind, _, path = controller.partition(":")
    if kind in ("pretrained", "checkpoint"):
        # Few loops follow a trained agent, and the others need not load what its file is read with.
        from esper.files.policy import find_policy

        return find_policy(path or controller).controller(env, run_seed)
    if kind == "plans":
        _inform(env, path)
        controller = kind
    return make_controller(
        controller,
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


def check_name(controller: str | OwnController) -> None:
    """Raises ConfigError, listing the known names, unless ``controller`` names one, or is a callable."""
    name = name_of(controller)
    if not isinstance(controller, str) or is_user_code(name):
        return
    kind, _, path = name.partition(":")
    if name == "pretrained" or (kind == "checkpoint" and path):
        return
    if name == "ppo":
        raise ConfigError(
            "ppo must be trained before it can be compared: train it with `esper run`, then name checkpoint:RUN_FOLDER"
        )
    if kind not in {known.partition(":")[0] for known in CONTROLLERS}:
        similar = did_you_mean(str(name), NAMES)
        raise ConfigError(f"unknown controller {name!r}{similar}; known: {', '.join(NAMES)}")
