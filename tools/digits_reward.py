"""A reward for tools/bench_loop.py that differs between responses of any model: all are trained on."""


def score(prompt: str, response: str, label: str, metadata: dict[str, object]) -> float:
    """Return the share of digits in the response."""
    return sum(character.isdigit() for character in response) / max(1, len(response))
