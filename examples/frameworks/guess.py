"""What all the games of this folder share: their question and their answers."""

import re

QUESTION = "Guess a number from 1 to 20."


def answer(text, number):
    """Return what the game says to a player who said `text`."""
    guess = re.search(r"\b\d{1,2}\b", text)
    if guess is None:
        return "That is no number from 1 to 20."
    return "Right!" if int(guess[0]) == number else "Higher." if int(guess[0]) < number else "Lower."
