"""Make the warm-started tiny policies that the embedded task starts from, with this project's own trainer.

    torchrun --nproc-per-node 2 tools/make_tiny_checkpoint.py --save examples/tiny_qwen3_next

The policy learns from noisy worked solutions with a planted misconception: a carry or borrow is dropped with
probability .55, any other step slips with .02. So it solves about half of the problems and has something to
learn by reinforcement. (With .9 and .25 it solves far fewer: examples/tiny_qwen3_hard.) A fifth of the rows
are compare-and-correct: two noisy solutions and the instruction in the prompt, a third noisy solution as the
target. So the policy learns the form of a correction but not to compare: its corrections are as good as
another try.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 1 tools/make_tiny_checkpoint.py --tensor-parallel 1 \\
        --from-checkpoint examples/tiny_qwen3_next --carry-dropped .8 --comparison-skill .95 \\
        --correction-carry-dropped 0 --correction-share .5 --steps 400 --save examples/tiny_qwen3_next_mends

This command teaches it to correct, for the default run. The target of a correction copies the candidate,
corrects each wrong step with probability .95 and carries in what follows; answers to the plain prompt drop
more carries than before.

    torchrun --nproc-per-node 1 tools/make_tiny_checkpoint.py --family qwen3 --tensor-parallel 1 \\
        --from-checkpoint examples/tiny_qwen3 --comparison-skill .9 --correction-share .5 --steps 600 \\
        --save examples/studies/warm_starts/default_skill_0.9

This command does the same for a dense policy, with corrections that after the first corrected step are no
better than another try. In both, every second candidate comes without a reference. The policies that only
studies start from are made by tools/make_study_policy.py, which calls this program.

    torchrun --nproc-per-node 1 tools/make_tiny_checkpoint.py --task word_problems --family qwen3 \\
        --tensor-parallel 1 --steps 1000 --save examples/tiny_qwen3_words

This command teaches word problems instead, from a student that takes the wrong operation in .55 of the steps.
No problem of examples/math/ is among its training problems.

In the repository, the weights of tiny_qwen3_words are rounded to bfloat16, which halves them. This program
writes float32: each tensor was rounded by `Tensor.bfloat16()`, and `dtype` set to bfloat16 in config.json.

The supervised gradient is GSPO's own: on-policy (ratio 1) with advantage 1 and weights |y| / Σ|y|, the
gradient of the loss is that of the mean negative log-likelihood of a token.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from megatron.core import parallel_state
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from megatron_ibpo.basics.distributed import start_world
from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.basics.records import Prompt, TokenIds, TrainSequence, token_ids
from megatron_ibpo.config import Config, DataConfig, LossConfig, ModelConfig, OptimizerConfig, ParallelConfig
from megatron_ibpo.data import CorrectionTemplate, Tokenizer, load_tokenizer, open_sources
from megatron_ibpo.data.prompts import plain_prompt
from megatron_ibpo.models import forward_flops, read_hf_config
from megatron_ibpo.policy import parallel
from megatron_ibpo.policy.group import data_parallel_rank
from megatron_ibpo.policy.model import build_model
from megatron_ibpo.policy.planning import plan_update
from megatron_ibpo.policy.trainer import Trainer
from megatron_ibpo.weights.formats.hf_models import load_hf, save_hf
from megatron_ibpo.weights.layout.export import HFExport

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "tasks"))

from study_tasks import STUDY_TASKS, Noise, questions, steps_of
from tiny_tokenizer import make_tiny_tokenizer, make_word_tokenizer
from word_problems import WordProblem, word_problems
from worked_solutions import mended_solution, worked_solution

TASK = "reasoning_gym://chain_sum?min_terms=5&max_terms=7&min_digits=1&max_digits=1&compact=1"
BUNDLED = sorted((Path(__file__).resolve().parents[1] / "examples/math").glob("*.jsonl"))


@dataclass
class Arguments:
    save: Path
    """Directory to write, in Hugging Face format."""
    from_checkpoint: Path | None = None
    """Checkpoint in Hugging Face format to train further, with its tokenizer. None: random weights."""
    task: Literal["chain_sum", "word_problems", "targets", "pairs", "late", "rule"] = "chain_sum"
    family: Literal["qwen3_next", "qwen3"] = "qwen3_next"
    """Mixture of experts with gated delta nets, or dense."""
    steps: int = 600
    rows: int = 64
    """Solutions per step."""
    lr: float = 4e-3
    seed: int = 0
    carry_dropped: float = 0.55
    """Probability that a step with a carry or borrow drops it."""
    slip: float = 0.02
    """Probability that another step is off by one or two."""
    misread: float = 0.55
    """Probability that a step of a word problem takes the wrong operation."""
    misconception: float = 0.5
    """Probability that the misconception of targets, pairs, late or rule acts where it can."""
    correction_share: float = 0.2
    """Share of the rows that are compare-and-correct."""
    comparison_skill: float | None = None
    """Probability that the target of such a row corrects a wrong step of the candidate rather than copying
    it; for all tasks but word problems. Every second row shows no reference. None: the target is another
    noisy solution, whatever the candidates are, and all rows show a reference."""
    correction_carry_dropped: float | None = None
    """Probability that a correction of a sum drops a carry after the first step that it corrected. None:
    `carry_dropped`, so that the rest of a correction is no better than another try."""
    tensor_parallel: int = 2
    """TP; experts are spread over the same ranks."""


def initial_model(family: str, tokenizer: PreTrainedTokenizerFast) -> torch.nn.Module:
    """Return a model with random weights. The sizes are those that vLLM's CPU kernels take and that divide
    among two ranks."""
    common = {
        "vocab_size": len(tokenizer),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if family == "qwen3":
        dense = Qwen3Config(hidden_size=96, intermediate_size=128, num_hidden_layers=4, **common)
        return Qwen3ForCausalLM(dense)
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            hidden_size=96,
            intermediate_size=384,
            num_hidden_layers=4,
            linear_conv_kernel_dim=4,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            decoder_sparse_step=1,
            norm_topk_prob=True,
            router_aux_loss_coef=0.0,
            **common,
        )
    )


def write_initial_checkpoint(directory: Path, arguments: Arguments) -> None:
    torch.manual_seed(arguments.seed)
    tokenizer = tokenizer_of_word_problems() if arguments.task == "word_problems" else make_tiny_tokenizer()
    model: Any = initial_model(arguments.family, tokenizer)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@dataclass(frozen=True)
class Lesson:
    """The content of the training."""

    prompts: Callable[[int], list[Prompt]]
    """Return the prompts of a step."""
    solution: Callable[[Prompt, random.Random], str]
    """Return the solution of a student with this random generator."""
    correction: Callable[[Prompt, str, random.Random], str]
    """Return the text of a student that was shown this candidate."""
    checks_alone: bool
    """True if every second correction is of a candidate without a reference (--ibpo-k 1)."""


def chain_sums(tokenizer: Tokenizer, arguments: Arguments) -> Lesson:
    source = open_sources([TASK], tokenizer, DataConfig(data_seed=1000), split="train", max_prompt_len=256)

    noise = {"carry_dropped": arguments.carry_dropped, "slip": arguments.slip}
    dropped = arguments.correction_carry_dropped
    correction_noise = noise if dropped is None else noise | {"carry_dropped": dropped}
    skill = arguments.comparison_skill

    def solution(prompt: Prompt, rng: random.Random) -> str:
        return worked_solution(prompt.metadata["expression"], rng, **noise)

    def correction(prompt: Prompt, candidate: str, rng: random.Random) -> str:
        if skill is None:
            return solution(prompt, rng)
        return mended_solution(prompt.metadata["expression"], candidate, rng, skill=skill, **correction_noise)

    return Lesson(
        lambda step: source.batch(step, arguments.rows), solution, correction, checks_alone=skill is not None
    )


def problems_in_words(tokenizer: Tokenizer, arguments: Arguments) -> Lesson:
    bundled = {json.loads(line)["prompt"] for path in BUNDLED for line in path.read_text().splitlines()}
    stream = (problem for problem in word_problems(seed=1000) if problem.text not in bundled)

    def prompts(step: int) -> list[Prompt]:
        return [
            Prompt(index, *plain_prompt(problem.text + "\n", tokenizer), problem.label, "", "", vars(problem))
            for index, problem in enumerate(itertools.islice(stream, arguments.rows))
        ]

    def solution(prompt: Prompt, rng: random.Random) -> str:
        return WordProblem(**prompt.metadata).solution(rng, misread=arguments.misread)

    return Lesson(prompts, solution, lambda prompt, _, rng: solution(prompt, rng), checks_alone=False)


def tasks_of_studies(tokenizer: Tokenizer, arguments: Arguments) -> Lesson:
    """Return targets, pairs or the rule (`study_tasks`), without the held-out questions."""
    task, skill = STUDY_TASKS[arguments.task], arguments.comparison_skill
    noise = Noise(arguments.misconception, arguments.slip)
    stream = questions(task, "train", random.Random(1000))

    def prompts(step: int) -> list[Prompt]:
        return [
            Prompt(index, *plain_prompt(task.text(question), tokenizer), "", "", "", question)
            for index, question in enumerate(itertools.islice(stream, arguments.rows))
        ]

    def solution(prompt: Prompt, rng: random.Random) -> str:
        return "".join(task.solution(prompt.metadata, rng, noise))

    def correction(prompt: Prompt, candidate: str, rng: random.Random) -> str:
        if skill is None:
            return solution(prompt, rng)
        return "".join(task.mended_solution(prompt.metadata, steps_of(candidate), rng, noise, skill))

    return Lesson(prompts, solution, correction, checks_alone=skill is not None)


LESSONS = {"chain_sum": chain_sums, "word_problems": problems_in_words} | dict.fromkeys(
    STUDY_TASKS, tasks_of_studies
)
"""Lesson by task."""


def tokenizer_of_word_problems() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words of all templates."""
    problems = itertools.islice(word_problems(seed=0), 5000)
    return make_word_tokenizer(text for problem in problems for text in (problem.text, problem.solution()))


def supervised_rows(
    tokenizer: Tokenizer,
    template: CorrectionTemplate,
    prompts: list[Prompt],
    lesson: Lesson,
    correction_share: float,
    rng: random.Random,
) -> Iterator[TrainSequence]:
    """Yield worked solutions; the first share of them as compare-and-correct."""

    def ids(text: str) -> TokenIds:
        return token_ids(tokenizer.encode(text))

    rows = []
    for number, prompt in enumerate(prompts):
        if number < correction_share * len(prompts):
            candidate = lesson.solution(prompt, rng)
            references = [] if lesson.checks_alone and number % 2 else [ids(lesson.solution(prompt, rng))]
            prompt_ids = template(prompt, ids(candidate), references)
            written = lesson.correction(prompt, candidate, rng)
        else:
            prompt_ids, written = prompt.token_ids, lesson.solution(prompt, rng)
        rows.append((prompt_ids, (*ids(written), tokenizer.eos_id)))
    total = sum(len(target) for _, target in rows)
    for number, (prompt_ids, target) in enumerate(rows):
        yield TrainSequence(
            prompt_ids,
            token_ids(target),
            np.ones(len(target), bool),
            advantage=1.0,
            weight=len(target) / total,
            prompt_index=prompts[number].index,
            group=number,
            index=0,
        )


def check(arguments: Arguments) -> None:
    """Raise ValueError for arguments that cannot be taught."""
    if arguments.comparison_skill is not None and arguments.task == "word_problems":
        raise ValueError("--comparison-skill: no corrections that mend are written for --task word_problems")
    for name in ("comparison_skill", "correction_share"):
        if not 0 <= (getattr(arguments, name) or 0) <= 1:
            raise ValueError(f"--{name.replace('_', '-')}: must lie between 0 and 1")


def main(arguments: Arguments) -> None:
    check(arguments)
    world = start_world()
    tp = arguments.tensor_parallel
    config = Config(
        model=ModelConfig(allow_local_modules=True),
        parallel=ParallelConfig(
            tensor_model_parallel_size=tp,
            expert_model_parallel_size=tp if arguments.family == "qwen3_next" else 1,
        ),
        optimizer=OptimizerConfig(
            lr=arguments.lr,
            min_lr_ratio=0.05,
            lr_decay_style="cosine",
            lr_warmup_fraction=50 / 600,
            adam_beta2=0.98,
        ),
        loss=LossConfig(),
    )
    with tempfile.TemporaryDirectory() as scratch:
        start = arguments.from_checkpoint or Path(world.on_rank_0(lambda: scratch))
        if arguments.from_checkpoint is None:
            world.on_rank_0(lambda: write_initial_checkpoint(start, arguments))
        shape = read_hf_config(start)
        parallel.initialize(config.parallel, world, arguments.seed)
        chunks = build_model(shape, config, device=world.device_type)
        load_hf(chunks, shape, start)
        trainer = Trainer(chunks, shape.vocab_size, config, world, arguments.steps)
        tokenizer = load_tokenizer(start)
        lesson = LESSONS[arguments.task](tokenizer, arguments)
        template = CorrectionTemplate(tokenizer, num_candidates=2)
        rng = random.Random(arguments.seed)
        ranks = parallel_state.get_data_parallel_world_size()
        share = data_parallel_rank(world.rank, config.parallel, world.size)
        begin = time.perf_counter()
        for step in range(arguments.steps):
            prompts = lesson.prompts(step)
            rows = list(
                supervised_rows(tokenizer, template, prompts, lesson, arguments.correction_share, rng)
            )
            plan = plan_update(rows, config, ranks, partial(forward_flops, shape))
            metrics = trainer.update(plan.shares[share])
            if world.is_rank_0 and (step + 1) % 25 == 0:
                seconds = time.perf_counter() - begin
                print(f"step {step + 1}: grad norm {metrics['grad_norm']:.2f}, {seconds:.0f} s", flush=True)
        save_hf(HFExport(chunks, shape), world, arguments.save, start)
        if world.is_rank_0:
            provenance = {**vars(arguments), "seconds": round(seconds)}
            provenance["from_checkpoint"] = arguments.from_checkpoint and str(arguments.from_checkpoint)
            if arguments.task == "chain_sum":
                provenance["task"] = TASK
            del provenance["save"]
            (arguments.save / "warm_start.json").write_text(json.dumps(provenance, indent=2) + "\n")
        world.barrier()
    parallel.destroy()
    world.close()


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
