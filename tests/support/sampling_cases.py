from simulated_engines import StepTime

from megatron_ibpo.basics.records import Prompt, token_ids
from megatron_ibpo.config import RolloutConfig

STEP = StepTime(fixed=0.01, per_sequence=0.001)
ROLLOUT = RolloutConfig(rollout_batch_size=6, n_samples_per_prompt=4, rollout_max_response_len=40)


def make_prompts(first, count=ROLLOUT.rollout_batch_size):
    return [Prompt(i, token_ids([i + 2, 7]), 1, "", "", "") for i in range(first, first + count)]


def judge(prompt, sample):
    sample.correct = (prompt.index + int(sample.token_ids.sum())) % 3 == 0
    sample.reward = float(sample.correct)
