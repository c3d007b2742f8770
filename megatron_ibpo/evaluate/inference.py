"""Compare-and-correct at test time, the paper's GSPO+Prompt: every sample is corrected alongside others.

Nothing here looks at a reward or a label: the samples shown are drawn uniformly and passed on without scores.
Training's rule, which shows a wrong response beside a correct one, would tell the policy that its response
was wrong.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_ibpo.basics.records import Prompt, Sample, SampleRequest, TokenIds
from megatron_ibpo.basics.seeds import derive_seed
from megatron_ibpo.config import EvalSampling
from megatron_ibpo.evaluate.eval_sample import Asked, EvalSample


@dataclass(frozen=True)
class Corrector:
    """The way solutions are corrected at test time."""

    prompt_ids: Callable[[Prompt, Sequence[Sample]], TokenIds]
    """(prompt, candidate solutions, the one to be corrected first) → x̃."""
    num_candidates: int
    """K: number of a prompt's samples in a correction prompt."""
    max_context: int
    """Limit of tokens in x̃ and the correction together."""


def corrections_asked(
    prompt: Prompt,
    samples: Sequence[EvalSample],
    corrector: Corrector,
    sampling: EvalSampling,
    seed: int,
) -> list[Asked]:
    """Return one correction request per sample of a prompt, except where x̃ leaves no room for the
    correction.

    Args:
        samples: all samples of the prompt, by number; at least num_candidates.
    """
    asked = []
    for number, target in enumerate(samples):
        rng = random.Random(derive_seed("test-time pair", seed, prompt.index, number))
        others = rng.sample([*samples[:number], *samples[number + 1 :]], corrector.num_candidates - 1)
        x_tilde = corrector.prompt_ids(prompt, [own.as_candidate(prompt) for own in (target, *others)])
        if len(x_tilde) + sampling.max_tokens <= corrector.max_context:
            request = SampleRequest(
                x_tilde,
                derive_seed("test-time correction", seed, prompt.index, number),
                sampling.max_tokens,
                sampling.temperature,
                sampling.top_p,
                sampling.top_k,
            )
            asked.append(Asked(("correction", prompt.index, number), prompt, request))
    return asked
