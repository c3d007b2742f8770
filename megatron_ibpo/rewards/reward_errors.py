"""Whose fault it is when a reward function cannot judge."""

RESPONSE_ERROR = "response_error"
"""The detail of a response that could not be judged for its own fault: 1."""


class ResponseError(Exception):
    """Raised by a reward function for what the response has caused: it asks for more than can be computed, or
    is malformed so that a judge stumbles. The response is wrong: its reward is 0, with the detail
    `response_error`, which metrics count. Every other exception is an error of the verifier or the label, and
    no reward at all.
    """


class LabelError(ValueError):
    """A label that cannot be graded; the text says which and why."""
