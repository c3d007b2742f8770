"""The game as a server of OpenEnv: `uvicorn guess_openenv:app --port 8000`."""

import random

from guess import QUESTION, answer
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    message: str


class Reply(Observation):
    message: str


class GuessTheNumber(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **row):
        self.number = random.Random(seed).randint(1, 20)
        return Reply(message=QUESTION)

    def step(self, action, timeout_s=None, **options):
        reply = answer(action.message, self.number)
        right = reply == "Right!"
        return Reply(message=reply, reward=float(right), done=right)

    @property
    def state(self):
        return State()


app = create_app(GuessTheNumber, Guess, Reply, max_concurrent_envs=256)
