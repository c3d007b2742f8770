"""A frozen policy that answers prompts of its task and has its responses scored, as in training."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import yaml

from megatron_ibpo.basics.records import Prompt, Sample, SampleRequest
from megatron_ibpo.config import Config, ConfigError
from megatron_ibpo.credit import CreditContext, Method, Vocabulary
from megatron_ibpo.data import (
    CorrectionTemplate,
    PromptSource,
    ResponseText,
    Tokenizer,
    TokenTexts,
    load_tokenizer,
)
from megatron_ibpo.engines.lean import LeanEngine, checkpoint_weights
from megatron_ibpo.models import ModelShape
from megatron_ibpo.rewards import open_verifier
from megatron_ibpo.run.cost import CostMeter
from megatron_ibpo.run.inputs import training_prompts
from megatron_ibpo.run.resolve import Foundation, read_foundation
from megatron_ibpo.run.settings import parse_config
from megatron_ibpo.sampling import Sampler, scorer
from megatron_ibpo.study.plan import Study, Task

LOSSES = ("gspo", "grpo")
"""Loss variants whose first update is advantage times mean gradient of the tokens."""


@dataclass(frozen=True, eq=False)
class Contender:
    """A method with a group size, ready to assign credit on one task."""

    name: str
    """Name of the method and size of its groups, such as "ibpo@8"."""
    config: Config
    method: Method
    context: CreditContext
    shape: ModelShape

    @property
    def size(self) -> int:
        """Responses per prompt."""
        return self.config.rollout.n_samples_per_prompt


@dataclass(frozen=True, eq=False)
class Space:
    """A task of a study with its policy: prompts, tokenizer, and the study's methods."""

    config: Config
    foundation: Foundation
    tokenizer: Tokenizer
    prompts: PromptSource
    contenders: dict[str, Contender]


def open_space(study: Study, task: Task, sizes: Sequence[int], scratch: Path) -> Space:
    """Read a task of a study.

    Args:
        sizes: group sizes at which each method is judged.
        scratch: directory for the resolved recipes.

    Raises:
        ConfigError: a method's settings cannot work, or its loss or sampling is none that is judged here.
    """
    names = [(name, size) for name in study.methods for size in sizes]
    configs = {f"{name}@{size}": _config(study, task, name, size, scratch) for name, size in names}
    config = configs[f"{study.baseline}@{max(sizes)}"]
    foundation = read_foundation(config)
    tokenizer = load_tokenizer(foundation.hf_dir, embedding_rows=foundation.shape.vocab_size)
    prompts = training_prompts(config, tokenizer, foundation.max_context)
    contenders = {name: _contender(name, own, tokenizer) for name, own in configs.items()}
    return Space(config, foundation, tokenizer, prompts, contenders)


def _config(study: Study, task: Task, method: str, size: int, scratch: Path) -> Config:
    settings = {**study.common, **task.settings, **study.methods[method], "n-samples-per-prompt": size}
    path = scratch / f"{method}@{size}.yaml"
    path.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    base = [] if study.recipe is None else ["--config", str(study.recipe)]
    config = parse_config([*base, "--config", str(path)])
    rollout, loss = config.rollout, config.loss.loss_variant
    if loss not in LOSSES:
        raise ConfigError(f"method {method}: judges --loss-variant {' and '.join(LOSSES)} only, not {loss}")
    if rollout.rollout_temperature != 1 or rollout.rollout_top_p < 1 or rollout.rollout_top_k > 0:
        raise ConfigError(f"method {method}: judges sampling at temperature 1 without top-p and top-k only")
    return config


def _contender(name: str, config: Config, tokenizer: Tokenizer) -> Contender:
    foundation = read_foundation(config)
    method, shape = foundation.method, foundation.shape
    template = CorrectionTemplate(tokenizer, method.operator.ibpo_k)
    context = CreditContext(
        algorithm=config.algorithm,
        rollout=config.rollout,
        vocabulary=Vocabulary(template, TokenTexts(tokenizer)),
        max_context=foundation.max_context,
        seed=config.run.seed,
        step=0,
        reward_threshold=config.data.reward_threshold,
        price=CostMeter(shape, 1).of_sample,
    )
    return Contender(name, config, method, context, shape)


class FrozenPolicy:
    """Samples of a policy in this process, with the rewards of its task."""

    def __init__(self, space: Space, stack: ExitStack) -> None:
        """
        Raises:
            ValueError: a model that the lean engine does not compute.
        """
        foundation, config = space.foundation, space.config
        engine = LeanEngine(
            foundation.shape, foundation.eos_token_ids, max_context=foundation.max_context, most_at_once=512
        )
        engine.load(checkpoint_weights(foundation.shape, foundation.hf_dir), version=0)
        verifier = stack.enter_context(open_verifier(config.data))
        self._sampler = stack.enter_context(
            Sampler(
                [engine],
                scorer(verifier, ResponseText(space.tokenizer)),
                stall_timeout=config.rollout.engine_stall_timeout,
                max_context=foundation.max_context,
            )
        )

    def answers(self, requests: Sequence[tuple[Prompt, SampleRequest]]) -> list[Sample]:
        """Return a scored sample for every request, in order.

        Raises:
            RuntimeError: the verifier failed on one; a missing reward is not a reward of 0.
        """
        samples = self._sampler.run(self._sampler.answer_all(requests))
        for (prompt, _), sample in zip(requests, samples, strict=True):
            if sample.reward is None:
                raise RuntimeError(f"prompt {prompt.index}: the verifier failed: {sample.reward_error}")
        return samples
