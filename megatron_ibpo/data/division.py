"""The division of questions between training and evaluation by their hash."""

from dataclasses import dataclass

from megatron_ibpo.basics.seeds import derive_seed


@dataclass(frozen=True)
class Division:
    """A division of questions: equal ones are on one side, whatever the order of the rows."""

    seed: int
    limit: int
    """Questions with a hash up to this are held out."""

    def holds_out(self, question: str) -> bool:
        """Return True if the question is not trained on."""
        return question_hash(question, self.seed) <= self.limit


def question_hash(question: str, seed: int) -> int:
    """Return a number in [0, 2^63) that depends on the question and the seed alone."""
    return derive_seed("held out", seed, question)
