"""Counts in words."""


def counted(count: int, noun: str) -> str:
    """The count with its noun, singular for one: "1 rank", "2,048 prompts". The plural is a plain -s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
