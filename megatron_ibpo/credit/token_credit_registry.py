"""The token credits by name (--token-credit), and those of the user's own by import path."""

from megatron_ibpo.config import AlgorithmConfig, known_or_path, load_hook
from megatron_ibpo.credit.divergence import divergence_cut, divergence_window
from megatron_ibpo.credit.random_window import random_window
from megatron_ibpo.credit.self_teacher import self_teacher
from megatron_ibpo.credit.token_credit import TokenCredit, uniform
from megatron_ibpo.credit.wrong_weight import wrong_weight, wrong_weight_by_length

TOKEN_CREDITS: dict[str, TokenCredit] = {
    "uniform": uniform,
    "wrong-weight": wrong_weight,
    "wrong-weight-by-length": wrong_weight_by_length,
    "divergence-window": divergence_window,
    "divergence-cut": divergence_cut,
    "random-window": random_window,
    "self-teacher": self_teacher,
}
"""--token-credit → what weighs the tokens of responses."""


def find_token_credit(algorithm: AlgorithmConfig) -> TokenCredit:
    """The token credit that the algorithm names, in TOKEN_CREDITS or by an import path package.module:name.

    Raises:
        ValueError: there is none.
    """
    name = algorithm.token_credit
    known = known_or_path("--token-credit", name, TOKEN_CREDITS, "token credit")
    return known or load_hook("--token-credit", name, called_with="groups, advantages and the context")
