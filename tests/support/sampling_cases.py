"""Makes prompts for simulated engines, and judges the samples by a rule."""

from simulated_engines import StepTime

from megatron_ibpo.basics.records import Prompt, Sample, token_ids
from megatron_ibpo.config import RolloutConfig

STEP = StepTime(fixed=0.01, per_sequence=0.001)
ROLLOUT = RolloutConfig(rollout_batch_size=6, n_samples_per_prompt=4, rollout_max_response_len=40)


def make_prompts(first: int, count: int = ROLLOUT.rollout_batch_size) -> list[Prompt]:
    return [Prompt(i, token_ids([i + 2, 7]), 1, "", "", "") for i in range(first, first + count)]


def judge(prompt: Prompt, sample: Sample) -> None:
    sample.correct = (prompt.index + int(sample.token_ids.sum())) % 3 == 0
    sample.reward = float(sample.correct)
