"""The methods, token credits and estimators by name, and the user's own by import path."""

from dataclasses import dataclass
from typing import Any

from megatron_ibpo.config import (
    AlgorithmConfig,
    Config,
    Registry,
    algorithm_of,
    built,
    known_or_path,
    load_hook,
)
from megatron_ibpo.credit.corrections import CompareAndCorrect
from megatron_ibpo.credit.divergence import DivergenceCut, DivergenceWindow
from megatron_ibpo.credit.estimators import (
    Estimator,
    gives_token_advantages,
    group_mean,
    group_z_score,
    group_z_score_bessel,
    leave_one_out,
    maxrl,
    needs_critic,
)
from megatron_ibpo.credit.importance import SpanMasking
from megatron_ibpo.credit.operator import NoOperator, Operator
from megatron_ibpo.credit.self_teacher import SelfTeacher
from megatron_ibpo.credit.token_credit import TokenCredit, WrongWeight, WrongWeightByLength, uniform
from megatron_ibpo.credit.value_credit import Critic

OPERATORS: dict[str, type[Operator]] = {
    "compare-and-correct": CompareAndCorrect,
    "none": NoOperator,
    "span-masking": SpanMasking,
}
"""--ibpo-operator → the operator that judges wrong responses."""

TOKEN_CREDITS: dict[str, Any] = {
    "uniform": uniform,
    "wrong-weight": WrongWeight,
    "wrong-weight-by-length": WrongWeightByLength,
    "divergence-window": DivergenceWindow,
    "divergence-cut": DivergenceCut,
    "self-teacher": SelfTeacher,
}
"""--token-credit → the token credit that weighs the tokens of responses."""

ESTIMATORS: dict[str, Any] = {
    "group": group_z_score,
    "group-bessel": group_z_score_bessel,
    "group-mean": group_mean,
    "leave-one-out": leave_one_out,
    "maxrl": maxrl,
    "critic": Critic,
}
"""--advantages → the estimator."""


def find_operator(algorithm: AlgorithmConfig) -> Operator:
    """Return the method of --ibpo-operator with its parameters. Raises ConfigError if there is no such
    method, it lacks `judge`, or a parameter is out of range."""
    return built(_operator(algorithm.ibpo_operator), algorithm.parameters)


@dataclass(frozen=True)
class Method:
    """The method of a run, built with its parameters."""

    operator: Operator
    estimator: Estimator
    token_credit: TokenCredit


def find_method(algorithm: AlgorithmConfig, operator: Operator | None = None) -> Method:
    """Return the method of --ibpo-operator, unless an operator is given, --advantages and --token-credit.
    Raises as `find_operator`."""
    operator = operator or find_operator(algorithm)
    return Method(operator, find_estimator(algorithm), find_token_credit(algorithm))


def find_token_credit(algorithm: AlgorithmConfig) -> TokenCredit:
    """Return the token credit of --token-credit with its parameters. Raises as `find_operator`."""
    return built(_token_credit(algorithm.token_credit), algorithm.parameters)


def find_estimator(algorithm: AlgorithmConfig) -> Estimator:
    """Return the estimator of --advantages with its parameters. Raises as `find_operator`."""
    return built(_estimator(algorithm.advantages), algorithm.parameters)


def credit_of(preset: str, **settings: Any) -> AlgorithmConfig:
    """Return the algorithm settings of a preset, with other settings and parameters on top. Raises
    ConfigError for an unknown name, or a parameter that the choice does not have."""
    return algorithm_of(preset, REGISTRIES, **settings)


def check_credit(config: Config) -> None:
    """Refuse credit that cannot work: raise ValueError with one line per problem."""
    problems: list[str] = []
    parts: list[Any] = []
    for find in (find_operator, find_estimator, find_token_credit):
        try:
            parts.append(find(config.algorithm))
        except ValueError as error:
            problems += str(error).splitlines()
    for part in parts:
        problems += part.problems(config) if hasattr(part, "problems") else []
    if len(parts) == 3:
        problems += _contradictions(config.algorithm, *parts)
    if problems:
        raise ValueError("\n".join(problems))


def _contradictions(
    algorithm: AlgorithmConfig, operator: Operator, estimator: Estimator, token_credit: TokenCredit
) -> list[str]:
    """Return the conflicts between choices that are valid alone."""
    problems = []
    if gives_token_advantages(estimator):
        for_responses = {
            f"--token-credit {algorithm.token_credit}": algorithm.token_credit != "uniform",
            "--ibpo-variant signed-mask": algorithm.parameters.get("ibpo_variant") == "signed-mask",
            f"--ibpo-plain-prompt {operator.ibpo_plain_prompt}": operator.ibpo_plain_prompt != "none",
        }
        problems += [
            f"{flag} goes by one advantage per response, and --advantages {algorithm.advantages} gives every "
            "token its own; drop one of them"
            for flag, is_set in for_responses.items()
            if is_set
        ]
    if operator.masks_tokens and getattr(token_credit, "chooses_tokens", False):
        variant = algorithm.parameters.get("ibpo_variant")
        chosen_by = f"--ibpo-variant {variant}" if variant else f"--ibpo-operator {algorithm.ibpo_operator}"
        problems.append(
            f"--token-credit {algorithm.token_credit} and {chosen_by} both choose the tokens that a wrong "
            "response learns from, and few tokens are in both; take --ibpo-variant base, or "
            "--token-credit wrong-weight"
        )
    if algorithm.advantages == "maxrl" and (
        algorithm.overlong_buffer_share > 0 or operator.ibpo_rewrite_penalty > 0
    ):
        problems.append(
            "--advantages maxrl takes the log of a mean reward, and --overlong-buffer-share and "
            "--ibpo-rewrite-penalty make rewards negative; drop them"
        )
    return problems


def _operator(name: str) -> Any:
    if named := known_or_path("--ibpo-operator", name, OPERATORS, "operator"):
        return named
    hook = load_hook("--ibpo-operator", name)
    kind = hook if isinstance(hook, type) else type(hook)
    if not issubclass(kind, Operator) or kind.__abstractmethods__:
        raise ValueError(
            f"--ibpo-operator {name}: must be a subclass of megatron_ibpo.credit.Operator that defines "
            "judge (docs/extending.md)"
        )
    return hook


def _token_credit(name: str) -> Any:
    named = known_or_path("--token-credit", name, TOKEN_CREDITS, "token credit")
    return named or load_hook("--token-credit", name, called_with="groups, advantages and the context")


def _estimator(name: str) -> Any:
    if named := known_or_path("--advantages", name, ESTIMATORS, "estimator"):
        return named
    hook = load_hook("--advantages", name)
    if needs_critic(hook) != hasattr(hook, "of_values"):
        raise ValueError(
            f"--advantages {name}: an estimator that reads a critic's values has needs_critic = True and a "
            "method of_values(sequences, values); it has only one of them"
        )
    if needs_critic(hook):
        return hook
    return hook if hasattr(hook, "of_batch") else load_hook("--advantages", name, called_with="rewards")


REGISTRIES = (
    Registry("ibpo_operator", OPERATORS, _operator),
    Registry("token_credit", TOKEN_CREDITS, _token_credit),
    Registry("advantages", ESTIMATORS, _estimator),
)
"""Settings whose choices have parameters, for `megatron_ibpo.config.parse_config`."""
