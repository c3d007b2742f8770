"""The game for TextArena. The reward is what `close()` of the base class returns."""

import random

import textarena
from guess import QUESTION, answer


class GuessTheNumber(textarena.Env):
    def reset(self, num_players, seed=None):
        self.state = textarena.SinglePlayerState(num_players=num_players, seed=seed, max_turns=20)
        self.number = random.randint(1, 20)
        self.state.reset(game_state={}, player_prompt_function=lambda player_id, game_state: QUESTION)

    def step(self, action):
        reply = answer(action, self.number)
        if reply == "Right!":
            self.state.set_outcome(reward=1, reason=reply)
        else:
            self.state.add_observation(reply, textarena.ObservationType.GAME_MESSAGE)
        return self.state.step()
