"""Policies that play episodes of an environment in a test."""

from __future__ import annotations


def say(text):
    """Return a message of the policy."""
    return {"role": "assistant", "content": text}


def call(name, **arguments):
    """Return a message of the policy that calls a tool."""
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
    }


def guess_number(environment, seed, form="{}", largest=20):
    """Play a game of guessing a number by halving what is left, as an episode does.

    Returns:
        (the numbers guessed, what `score` returned)
    """
    opening = environment.reset("", "", {}, seed)
    low, high, guesses = 1, largest, []
    while True:
        guesses.append((low + high) // 2)
        turn = environment.step(
            call("guess", number=guesses[-1]) if opening.tools else say(form.format(guesses[-1]))
        )
        told = turn.messages[-1]["content"].lower() if turn.messages else ""
        if turn.done or "right" in told:
            break
        assert ("higher" in told) != ("lower" in told), told
        low, high = (guesses[-1] + 1, high) if "higher" in told else (low, guesses[-1] - 1)
    if not turn.done:
        assert environment.step(say("Done.")).done
    score = environment.score()
    environment.close()
    return guesses, score
