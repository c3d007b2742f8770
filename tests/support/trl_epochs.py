"""TRL's GRPOTrainer on recorded samples, with several iterations (μ) over two mini-batches.

PYTHONPATH=tests:. "$(bash tools/bootstrap.sh)" -m support.trl_epochs

writes tests/golden/trl_epochs.json. It needs requirements/bench.txt.
"""

import json
import random
import tempfile
from unittest import mock

from support.paths import ROOT
from support.tiny_models import make_qwen3

FILE = ROOT / "tests/golden/trl_epochs.json"
GROUPS, SAMPLES, ITERATIONS = 2, 4, 3
SETTINGS = {
    "token": {"epsilon": 0.2, "learning_rate": 1e-4},
    "sequence": {"epsilon": 0.1, "learning_rate": 5e-5},
}
"""Level of the ratios → settings with which some terms are clipped and others are not."""


def make_model(directory):
    return make_qwen3(directory, 3, std=0.1)


def make_samples():
    """Return (prompt, response) ids and rewards, of all groups in order."""
    draw = random.Random(5)
    prompts = [[draw.randrange(2, 64) for _ in range(3 + group)] for group in range(GROUPS)]
    responses = [
        [draw.randrange(2, 64) for _ in range(draw.randrange(2, 20))] for _ in range(GROUPS * SAMPLES)
    ]
    return [(prompts[n // SAMPLES], own, float(n % 3 == 0)) for n, own in enumerate(responses)]


def train(level, directory, samples):
    """Return the advantages, each optimizer step's metrics, and the mean log-prob of each response after
    them."""
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    advantages = []

    class Recorded(GRPOTrainer):
        def _generate(self, prompts):
            texts = [str(n) for n in range(len(samples))]
            ids = [list(own[0]) for own in samples], [list(own[1]) for own in samples]
            return *ids, None, texts, None, {}, None, None

        def _generate_and_score_completions(self, inputs):
            made = super()._generate_and_score_completions(inputs)
            advantages.extend(made["advantages"].tolist())
            return made

    vocabulary = Tokenizer(WordLevel({str(n): n for n in range(64)}, unk_token="1"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="0", eos_token="1")
    with tempfile.TemporaryDirectory() as scratch, mock.patch(
        "trl.trainer.grpo_trainer.shuffle_sequence_dict", lambda batch: batch
    ):  # fmt: skip
        trainer = Recorded(
            model=AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32),
            processing_class=tokenizer,
            reward_funcs=lambda completions, **_: [own[2] for own in samples],
            train_dataset=Dataset.from_dict({"prompt": [str(n) for n in range(GROUPS)]}),
            args=GRPOConfig(
                output_dir=scratch, use_cpu=True, bf16=False, gradient_checkpointing=False, loss_type="grpo",
                importance_sampling_level=level, beta=0.0, num_generations=SAMPLES, num_iterations=ITERATIONS,
                per_device_train_batch_size=SAMPLES, steps_per_generation=GROUPS, max_completion_length=20,
                max_steps=GROUPS * ITERATIONS, lr_scheduler_type="constant", adam_beta2=0.95,
                max_grad_norm=1.0, shuffle_dataset=False, logging_steps=1, report_to=[], save_strategy="no",
                disable_tqdm=True, **SETTINGS[level],
            ),
        )  # fmt: skip
        trainer.train()
    steps = [
        {
            "loss": row["loss"],
            "grad_norm": row["grad_norm"],
            "clip_fraction": row["clip_ratio/region_mean"],
        }
        for row in trainer.state.log_history
        if "loss" in row
    ]
    return {"advantages": advantages, "steps": steps, "logprobs": mean_logprobs(trainer.model, samples)}


def mean_logprobs(model, samples):
    import torch

    found = []
    with torch.no_grad():
        for prompt, response, _ in samples:
            ids = torch.tensor([prompt + response])
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
            found.append(logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None]).mean().item())
    return found


if __name__ == "__main__":
    import trl

    made = make_samples()
    with tempfile.TemporaryDirectory() as place:
        policy = make_model(f"{place}/model")
        found = {level: train(level, policy, made) for level in SETTINGS}
    FILE.write_text(json.dumps({"trl": trl.__version__, "samples": made, **found}, indent=1) + "\n")
