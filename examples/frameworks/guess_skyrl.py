"""The game for SkyRL-Gym."""

import random

from guess import QUESTION, answer
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class GuessTheNumber(BaseTextEnv):
    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.number = random.randint(1, 20)

    def init(self, prompt):
        return [{"role": "user", "content": QUESTION}], {}

    def step(self, action):
        reply = answer(action, self.number)
        right = reply == "Right!"
        observations = [{"role": "user", "content": reply}]
        return BaseTextEnvStepOutput(observations=observations, reward=float(right), done=right, metadata={})
