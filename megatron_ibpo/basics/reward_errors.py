"""The errors of reward functions, by fault: of the response, or of the label."""

RESPONSE_ERROR = "response_error"
"""Detail of a response that could not be judged through its own fault: 1."""
WRONG = {"score": 0.0, RESPONSE_ERROR: 1.0}
"""Value of such a response."""


class ResponseError(Exception):
    """Raised by a reward function for a fault of the response: it asks for more than can be computed, or is
    so malformed that a judge fails on it.

    The response is wrong: its reward is 0, with the detail `response_error`, which metrics count. Every other
    exception is an error of the verifier or the label, and gives no reward at all.
    """


class LabelError(ValueError):
    """A label that cannot be graded; the text says which one and why."""
