"""Policies that play episodes of an environment in a test."""


def say(text):
    return {"role": "assistant", "content": text}


def call(name, **arguments):
    function = {"name": name, "arguments": arguments}
    calls = [{"id": "call_0", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def guess_number(environment, seed):
    """Play a game of guessing a number by halving what is left, as an episode does."""
    opening = environment.reset("", "", {}, seed)
    low, high, guesses = 1, 20, []
    while True:
        guesses.append(guess := (low + high) // 2)
        turn = environment.step(call("guess", number=guess) if opening.tools else say(str(guess)))
        told = turn.messages[-1]["content"].lower() if turn.messages else ""
        if turn.done or "right" in told:
            break
        assert ("higher" in told) != ("lower" in told), told
        low, high = (guess + 1, high) if "higher" in told else (low, guess - 1)
    if not turn.done:
        assert environment.step(say("Done.")).done
    score = environment.score()
    environment.close()
    return guesses, score
