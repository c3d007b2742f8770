"""The environments of docs/environments_compared.md, and stand-ins for the frameworks that they import."""

from __future__ import annotations

import random
from itertools import accumulate
from types import ModuleType, SimpleNamespace
from typing import Any

from support import openenv_server
from support.documented_modules import DOCS, write_modules


def write_compared_environments(directory):
    write_modules(directory, [DOCS / "environments_compared.md"], 7)


def stand_ins():
    kinds = SimpleNamespace(GAME_MESSAGE="message")
    return {
        **_package("skyrl_gym.envs.base_text_env", BaseTextEnv=BaseTextEnv, BaseTextEnvStepOutput=dict),
        **_package("gem", Env=GemEnv),
        **_package("textarena", Env=TextArenaEnv, SinglePlayerState=SinglePlayerState, ObservationType=kinds),
        **_package("openenv.core.env_server", Environment=object, State=dict, **vars(openenv_server)),
    }


def _package(name, **members):
    modules = {parent: ModuleType(parent) for parent in accumulate(name.split("."), "{}.{}".format)}
    vars(modules[name]).update(members)
    return modules


class BaseTextEnv:
    def close(self):
        pass

    def get_metrics(self):
        return {}


class GemEnv:
    def reset(self, seed=None):
        random.seed(seed)


class SinglePlayerState:
    def __init__(self, num_players, seed=None, max_turns=None):
        assert num_players == 1
        random.seed(seed)

    def reset(self, game_state, player_prompt_function):
        self.observations = [(-1, player_prompt_function(player_id=0, game_state=game_state), "prompt")]
        self.done, self.rewards = False, None

    def add_observation(self, message, observation_type, from_id=-1):
        self.observations.append((from_id, message, observation_type))

    def set_outcome(self, reward, reason):
        self.done, self.rewards = True, {0: reward}

    def step(self):
        return self.done, {}


class TextArenaEnv:
    state: Any

    def get_observation(self):
        shown, self.state.observations = self.state.observations, []
        return 0, shown

    def close(self):
        return self.state.rewards, {}
