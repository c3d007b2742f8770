"""One run put together: every room's object, and the verbs that the loop is written in."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megatron_ibpo import credit as credit_room
from megatron_ibpo.config import AlgorithmConfig, Config
from megatron_ibpo.cost import CostMeter, Spent
from megatron_ibpo.data import (
    CorrectionTemplate,
    PromptSource,
    PromptSuffixes,
    Tokenizer,
    load_tokenizer,
    open_source,
    thinking_marks,
    token_texts,
)
from megatron_ibpo.evaluate import Corrector, evaluate
from megatron_ibpo.policy import parallel
from megatron_ibpo.policy.checkpoint import (
    find_checkpoint,
    load_checkpoint,
    load_run_state,
    save_checkpoint,
)
from megatron_ibpo.policy.critic import Critic
from megatron_ibpo.policy.gradient_meter import compare_with_gspo
from megatron_ibpo.policy.model import build_model, build_value_model
from megatron_ibpo.policy.trainer import Trainer
from megatron_ibpo.records import Group, Prompt, Response, SampleRequest, TrainSequence
from megatron_ibpo.report import (
    Report,
    Stages,
    checkpoint_bytes,
    load_groups,
    outcomes_path,
    prepare_run_dir,
    rollout_path,
    run_sizes,
    save_groups,
    save_outcomes,
)
from megatron_ibpo.rewards import answer_extractor, open_verifier
from megatron_ibpo.rollout import EngineError
from megatron_ibpo.rollout.plans import group_requests
from megatron_ibpo.rollout.pool import EnginePool
from megatron_ibpo.shape import ModelShape, check_layout, read_hf_config
from megatron_ibpo.weights import HFExport, load_hf, save_hf
from megatron_ibpo.world import RemoteError, World, start_world

__all__ = ["START_ERRORS", "NotFiniteError", "Run", "assemble"]

START_ERRORS = (ValueError, OSError, EngineError, RemoteError)
"""What `assemble` raises for input that cannot work."""


GSPO = AlgorithmConfig(advantage_estimator="gspo", ibpo_lambda=0.0, ibpo_corrections=0, ibpo_joint=False)
"""Plain advantages of the responses alone: what the gradient meter compares with."""


class NotFiniteError(RuntimeError):
    """Too many steps in a row had a loss or gradient that is not finite."""


@dataclass
class Run:
    """A run in progress. Every method is collective: all ranks call it with the same arguments."""

    config: Config
    world: World
    tokenizer: Tokenizer
    template: CorrectionTemplate
    suffixes: PromptSuffixes
    token_texts: Callable[[Sequence[int]], list[str]]
    thinking: credit_room.ThinkingMarks | None
    """With --ibpo-strip-thinking."""
    placeholder_id: int | None
    """Of --ciw-placeholder; None where the tokenizer has no such token."""
    prompts: PromptSource | None
    """None when recorded rollouts are replayed."""
    eval_prompts: list[Prompt]
    verifier: Any
    """On the driver; None elsewhere."""
    extract_answer: Callable[[str], str | None] | None
    """For votes at evaluation, where the verifier's module has one and several samples are taken."""
    trainer: Trainer
    critic: Critic | None
    """With --advantages critic."""
    export: HFExport
    pool: EnginePool | None
    """None when recorded rollouts are replayed."""
    reporter: Report | None
    """On the driver; None elsewhere."""
    stages: Stages
    cost: CostMeter
    first_step: int
    start_seconds: dict[str, float] = field(default_factory=dict)
    steps_skipped_in_a_row: int = 0
    weights_checked: bool = False
    recorded_corrections: list[Response] = field(default_factory=list)
    sampling_metrics: dict[str, float] = field(default_factory=dict)
    """Of this step's dynamic sampling."""

    def done(self, step: int) -> bool:
        """Whether `step` completed steps are all: so many were asked for, or the budget is spent."""
        run = self.config.run
        within = run.budget is None or self.cost.spent.of(run.budget_unit) < run.budget
        return step >= run.num_rollout or not within

    def sample(self, step: int) -> list[Group]:
        """This step's groups, sampled and scored, or those that were recorded."""
        recorded = self.config.run.load_debug_rollout_data
        if recorded is not None:
            return self._replay(rollout_path(recorded, step + 1))
        algorithm, prompts = self.config.algorithm, self.config.rollout.rollout_batch_size
        if not algorithm.dynamic_sampling:
            return self._sample_groups(step, step)
        rounds = algorithm.dynamic_sampling_rounds
        groups, self.sampling_metrics = credit_room.fill_batch(
            lambda number: self._sample_groups(step, step * rounds + number), prompts, rounds
        )
        return groups

    def _sample_groups(self, step: int, batch: int) -> list[Group]:
        """The prompts of one batch of the source, answered and scored."""
        rollout = self.config.rollout
        assert self.prompts is not None
        prompts = self.prompts.batch(batch, rollout.rollout_batch_size)
        requests = group_requests(
            prompts, rollout, seed=self.config.run.seed, step=step, prompt_ids=self.suffixes
        )
        responses = self._generate(requests)
        size = rollout.n_samples_per_prompt
        groups = [
            Group(prompt, responses[place * size : (place + 1) * size])
            for place, prompt in enumerate(prompts)
        ]
        owners = [group.prompt for group in groups for _ in group.responses]
        for prompt, request, response in zip(owners, requests, responses, strict=True):
            if request.prompt_token_ids != prompt.token_ids:
                response.prompt_token_ids = request.prompt_token_ids
        self._score(list(zip(owners, responses, strict=True)))
        return groups

    def credit(self, groups: list[Group], step: int) -> credit_room.Credit:
        """Corrections, advantages and weights: what the algorithm makes of the groups."""
        with self.stages("credit"):
            credit = self._assign_credit(groups, step, self.config.algorithm)
        self._count_passes()
        return credit

    def measure_gradient_if_due(
        self, groups: list[Group], sequences: Sequence[TrainSequence], step: int
    ) -> dict[str, float]:
        """Every --gradient-meter-interval steps, before the update: how noisy the gradient is over prompts,
        and what GSPO's would be on the same responses."""
        run = self.config.run
        if run.gradient_meter_interval is None or step % run.gradient_meter_interval:
            return {}
        if run.debug_rollout_only:
            return {}
        if self.pool is not None:
            self.pool.sleep()
        with self.stages("gradient meter"):
            plain = self._assign_credit(groups, step, GSPO).sequences
            metrics = compare_with_gspo(self.trainer, sequences, plain, run.gradient_meter_blocks)
        self.trainer.take_passes()  # an instrument's are free
        return metrics

    def update(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """The optimizer steps of one rollout.

        Raises:
            NotFiniteError: --max-nonfinite-steps steps in a row had to be skipped.
        """
        if self.config.run.debug_rollout_only:
            return {}
        if self.pool is not None:
            self.pool.sleep()
        recording = self.config.run.save_debug_rollout_data
        if recording:
            for sequence, logprobs in zip(sequences, self._observed_logprobs(sequences), strict=True):
                sequence.old_logprobs = logprobs
        with self.stages("train"):
            metrics = self.trainer.update(sequences)
            if self.critic is not None:
                metrics |= self.critic.update(sequences)
        self._count_passes()
        if recording:
            for sequence, logprobs in zip(sequences, self._observed_logprobs(sequences), strict=True):
                sequence.new_logprobs = logprobs
        self.steps_skipped_in_a_row = self.steps_skipped_in_a_row + 1 if metrics["updates_skipped"] else 0
        if self.steps_skipped_in_a_row >= self.config.run.max_nonfinite_steps:
            raise NotFiniteError(
                f"{self.steps_skipped_in_a_row} steps in a row had a loss or gradient that is not finite; "
                "lower --lr, or look at the records kept by --save-debug-rollout-data"
            )
        return metrics

    def sync(self, version: int) -> dict[str, float]:
        """Give the engines the trainer's weights as `version`.

        Raises:
            WeightMismatchError: with --check-weight-update-equal, the engines have other weights.
        """
        if self.pool is None or self.config.run.debug_rollout_only:
            return {}
        with self.stages("sync"):
            metrics = self.pool.update_weights(self.export, version)
        if self.config.rollout.check_weight_update_equal and not self.weights_checked:
            with self.stages("check weights"):
                self._check_against_fresh_engine()
        return metrics

    def _check_against_fresh_engine(self) -> None:
        """After the run's first update, for what goes wrong inside engines goes wrong at once."""
        assert self.pool is not None
        assert self.config.model.hf_checkpoint is not None
        directory = self.config.run.run_dir / "weight_check"
        save_hf(self.export, self.world, directory, self.config.model.hf_checkpoint)
        self.pool.check_against_fresh_engine(directory)
        self.world.on_driver(lambda: shutil.rmtree(directory))
        self.weights_checked = True

    def report(
        self,
        step: int,
        groups: list[Group],
        sequences: Sequence[TrainSequence],
        metrics: dict[str, float],
    ) -> None:
        """Record step `step` (counted from 1), and what was spent with it."""
        seconds = self.stages.take()
        self.cost.time(self.world.on_driver(lambda: seconds))
        with self.stages("report"):
            if self.reporter is None:
                return
            if self.config.run.save_debug_rollout_data:
                path = rollout_path(self.config.run.run_dir / "rollouts", step)
                save_groups(path, step, groups, self.tokenizer.decode, sequences)
            restarts = self.pool.restarts if self.pool else 0
            spent = self.cost.spent.metrics()
            metrics = {**self.sampling_metrics, **metrics, **spent, "engine_restarts": restarts}
            self.reporter.step(step, metrics, seconds)

    def evaluate_if_due(self, step: int) -> None:
        """Evaluate at the start, at the end, and every --eval-interval steps."""
        run = self.config.run
        at_interval = run.eval_interval is not None and step % run.eval_interval == 0
        if self.pool is None or not self.eval_prompts:
            return
        if step > 0 and not self.done(step) and not at_interval:
            return
        rollout = self.config.rollout
        plain: list[tuple[Prompt, Response]] = []

        def score(pairs: list[tuple[Prompt, Response]]) -> None:
            self._ask_verifier(pairs)
            plain.extend([] if plain else pairs)  # the plain samples come first

        with self.stages("evaluate"):
            evaluation = evaluate(
                self.eval_prompts,
                self._ask_engines,
                score,
                samples_per_prompt=run.n_samples_per_eval_prompt,
                max_tokens=rollout.rollout_max_response_len,
                temperature=rollout.rollout_temperature,
                top_p=rollout.rollout_top_p,
                top_k=rollout.rollout_top_k,
                seed=run.seed,
                answer=self._answer if self.extract_answer is not None else None,
                corrector=self._corrector() if run.eval_compare_and_correct else None,
            )
        if self.reporter is not None:
            save_outcomes(outcomes_path(run.run_dir, step), step, plain)
            self.reporter.evaluation(step, evaluation, self.stages.take(), self.cost.spent.metrics())

    def _answer(self, response: Response) -> str | None:
        assert self.extract_answer is not None
        return self.extract_answer(self.tokenizer.decode(response.token_ids))

    def _corrector(self) -> Corrector:
        shown = credit_room.shown_parts(self.thinking)

        def prompt_ids(prompt: Prompt, candidates: Sequence[Response]) -> tuple[int, ...]:
            first, *others = [shown(prompt.token_ids, response).token_ids() for response in candidates]
            return self.template(prompt, first, others)

        return Corrector(prompt_ids, self.config.algorithm.ibpo_k, self.max_context)

    def agree_to_stop(self, requested: bool) -> bool:
        """Whether any rank was asked to stop."""
        return any(self.world.all_gather(requested))

    def save_if_due(self, step: int, *, stopping: bool) -> None:
        """A Megatron checkpoint at the end, every --save-interval steps, and before stopping early."""
        run = self.config.run
        at_interval = run.save_interval is not None and step % run.save_interval == 0
        if run.save and (at_interval or stopping or self.done(step)):
            state = {"seed": run.seed, "spent": asdict(self.cost.spent)}
            with self.stages("save"):
                save_checkpoint(self.trainer, run.run_dir / "checkpoints", step, state, self.critic)

    def finish(self, status: str) -> None:
        """Export the policy in Hugging Face format, draw the curves, write the summary."""
        run = self.config.run
        if run.save:
            assert self.config.model.hf_checkpoint is not None
            with self.stages("save"):
                save_hf(self.export, self.world, run.run_dir / "hf", self.config.model.hf_checkpoint)
        if self.reporter is not None:
            self.reporter.finish(status=status, seconds={**self.start_seconds, **self.stages.take()})

    @property
    def max_context(self) -> int:
        limit = self.config.rollout.rollout_max_context_len
        assert limit is not None  # `assemble` resolved it
        return limit

    def _assign_credit(
        self, groups: list[Group], step: int, algorithm: AlgorithmConfig
    ) -> credit_room.Credit:
        return credit_room.assign_credit(
            groups,
            algorithm,
            sample=self._generate,
            score=self._score,
            correction_prompt=self.template,
            rollout=self.config.rollout,
            max_context=self.max_context,
            seed=self.config.run.seed,
            step=step,
            reward_threshold=self.config.data.reward_threshold,
            token_texts=self.token_texts,
            thinking=self.thinking,
            logprobs=self._logprobs,
            placeholder_id=self.placeholder_id,
            values=None if self.critic is None else self._values,
        )

    def _generate(self, requests: list[SampleRequest]) -> list[Response]:
        if self.pool is None:
            taken = self.recorded_corrections[: len(requests)]
            del self.recorded_corrections[: len(requests)]
            if len(taken) < len(requests):
                raise ValueError(
                    "the recorded rollouts hold fewer corrections than this algorithm asks for: replay "
                    "with the settings they were recorded with"
                )
            return taken
        with self.stages("sample"):
            responses = self._ask_engines(requests)
        self.cost.sampling(requests, responses)
        return responses

    def _observed_logprobs(self, sequences: Sequence[TrainSequence]) -> list[tuple[float, ...]]:
        """For the record: free, and no part of training."""
        with self.stages("record"):
            logprobs = self.trainer.logprobs(sequences)
        self.trainer.take_passes()
        return logprobs

    def _count_passes(self) -> None:
        models: list[Trainer | Critic] = [self.trainer, *([self.critic] if self.critic else [])]
        for passes in [model.take_passes() for model in models]:
            self.cost.training(passes.forward, passes.updates)

    def _ask_engines(self, requests: list[SampleRequest]) -> list[Response]:
        assert self.pool is not None
        return self.pool.generate(requests)

    def _logprobs(self, queries: list[credit_room.LogProbQuery]) -> list[tuple[float, ...]]:
        if self.pool is not None:
            self.pool.sleep()
        rows = [
            TrainSequence(q.context, q.continuation, 0.0, 0.0, group=0, temperature=q.temperature)
            for q in queries
        ]
        with self.stages("log-probs"):
            return self.trainer.logprobs(rows)

    def _values(self, sequences: list[TrainSequence]) -> list[tuple[float, ...]]:
        assert self.critic is not None
        if self.pool is not None:
            self.pool.sleep()
        with self.stages("values"):
            return self.critic.values(sequences)

    def _score(self, pairs: list[tuple[Prompt, Response]]) -> None:
        with self.stages("score"):
            self._ask_verifier(pairs)

    def _ask_verifier(self, pairs: list[tuple[Prompt, Response]]) -> None:
        """Fill in the rewards that are not there yet."""
        open_pairs = [(p, r) for p, r in pairs if r.reward is None and r.reward_error is None]
        scores = self.world.on_driver(
            lambda: self.verifier.score([(p, self.tokenizer.decode(r.token_ids)) for p, r in open_pairs])
        )
        for (_, response), score in zip(open_pairs, scores, strict=True):
            response.reward, response.correct = score.reward, score.correct
            response.reward_error = score.error

    def _replay(self, path: Any) -> list[Group]:
        _, groups = load_groups(path)
        self.recorded_corrections = [c.response for group in groups for c in group.corrections]
        for group in groups:
            group.corrections, group.skipped_pairs = [], 0
        return groups


@contextmanager
def assemble(config: Config) -> Iterator[Run]:
    """Everything a run needs, started; closed again on the way out, whatever happens.

    What the user gave is checked first, then the engines start while the trainers build their model.

    Raises:
        one of START_ERRORS, with what is wrong, where, and what to do.
    """
    stages = Stages()
    hf_dir = config.model.hf_checkpoint
    assert hf_dir is not None  # check_config saw to it
    with ExitStack() as stack:
        with stages("start"):
            world = start_world(config.parallel.distributed_timeout_minutes)
            stack.callback(world.close)
            shape = read_hf_config(hf_dir)
            if problems := check_layout(shape, config.parallel, world.size):
                raise ValueError("this layout cannot hold the model:\n  " + "\n  ".join(problems))
            config = _with_context(config, shape)
            checkpoint = None if config.run.load is None else find_checkpoint(config.run.load)
            state: dict[str, Any] = {"step": 0} if checkpoint is None else load_run_state(checkpoint)
            first_step = state["step"]
            tokenizer = load_tokenizer(hf_dir)
            template = CorrectionTemplate(tokenizer, config.algorithm.ibpo_k)
            placeholder_id = _placeholder(config, tokenizer)
            thinking = None
            if config.algorithm.ibpo_strip_thinking:
                thinking = credit_room.ThinkingMarks(*thinking_marks(tokenizer))
            suffixes = PromptSuffixes(tokenizer, config.rollout.rollout_prompt_suffixes)
            prompts, eval_prompts = _open_prompts(config, tokenizer, suffixes.longest)
            world.on_driver(lambda: prepare_run_dir(config, checkpoint_bytes=_checkpoint_bytes(config)))
            verifier = _open_verifier(config, world, stack)
            votes = config.run.n_samples_per_eval_prompt > 1
            extract_answer = answer_extractor(config.data.rm_type) if votes else None
            pool = _start_engines(config, world, stack)

            parallel.initialize(config.parallel, world, config.run.seed)
            stack.callback(parallel.destroy)
            chunks = build_model(shape, config, device=world.device_type)
            load_hf(chunks, shape, hf_dir)
            export = HFExport(chunks, shape)
            updates = config.run.num_rollout * config.loss.num_steps_per_rollout
            trainer = Trainer(chunks, shape.vocab_size, config, world, updates)
            critic = _open_critic(config, shape, world, updates)
            if checkpoint is not None:
                load_checkpoint(trainer, checkpoint, critic)
            reporter = None
            if world.is_driver:
                reporter = stack.enter_context(Report(config, completed_steps=first_step))
                parameters = sum(math.prod(meta.shape) for meta in export.metadata())
                engines = None if pool is None else pool.num_engines
                sizes = run_sizes(
                    config,
                    world.size,
                    parameters=parameters,
                    engines=engines,
                    loss_backend=str(trainer.loss_backend),
                )
                reporter.sizes(sizes)
            if pool is not None:
                pool.wait_ready()
        run = Run(
            config=config,
            world=world,
            tokenizer=tokenizer,
            template=template,
            suffixes=suffixes,
            token_texts=token_texts(tokenizer),
            thinking=thinking,
            placeholder_id=placeholder_id,
            prompts=prompts,
            eval_prompts=eval_prompts,
            verifier=verifier,
            extract_answer=extract_answer,
            trainer=trainer,
            critic=critic,
            export=export,
            pool=pool,
            reporter=reporter,
            stages=stages,
            cost=CostMeter(
                shape,
                _accelerators(config, world, pool),
                recomputes=config.model.recompute_granularity == "full",
                before=Spent(**state.get("spent", {})),
            ),
            first_step=first_step,
        )
        if first_step > 0:
            run.sync(first_step)
        run.start_seconds = stages.take()
        with _failure_in_summary(reporter):
            yield run


def _with_context(config: Config, shape: ModelShape) -> Config:
    """The configuration with the context that prompt and response may take together."""
    asked = config.rollout.rollout_max_context_len
    limit = shape.max_position_embeddings
    if asked is not None and asked > limit:
        raise ValueError(f"--rollout-max-context-len {asked}: the model's context is {limit}")
    context = asked or limit
    if config.rollout.rollout_max_response_len >= context:
        raise ValueError(
            f"--rollout-max-response-len {config.rollout.rollout_max_response_len} leaves no room for a "
            f"prompt in a context of {context}"
        )
    return replace(config, rollout=replace(config.rollout, rollout_max_context_len=context))


def _open_prompts(
    config: Config, tokenizer: Tokenizer, growth: int
) -> tuple[PromptSource | None, list[Prompt]]:
    """(source of training prompts, held-out prompts); neither when recorded rollouts are replayed.

    Args:
        growth: tokens that perturbation may add to a training prompt.
    """
    if config.run.load_debug_rollout_data is not None:
        return None, []
    rollout = config.rollout
    assert rollout.rollout_max_context_len is not None
    assert config.data.prompt_data is not None
    room = rollout.rollout_max_context_len - rollout.rollout_max_response_len
    prompts = open_source(
        config.data.prompt_data, tokenizer, config.data, split="train", max_prompt_len=room - growth
    )
    if config.run.eval_num_prompts == 0:
        return prompts, []
    assert config.data.eval_prompt_data is not None
    held_out = open_source(
        config.data.eval_prompt_data, tokenizer, config.data, split="eval", max_prompt_len=room
    )
    count = config.run.eval_num_prompts
    return prompts, held_out.batch(0, min(count, len(held_out) or count))


def _open_critic(config: Config, shape: ModelShape, world: World, updates: int) -> Critic | None:
    """The value model, which starts from the policy's checkpoint; None where advantages need none."""
    if config.algorithm.advantages != "critic":
        return None
    assert config.model.hf_checkpoint is not None
    chunks = build_value_model(shape, config, device=world.device_type)
    load_hf(chunks, shape, config.model.hf_checkpoint, head=False)
    return Critic(chunks, config, world, updates)


def _placeholder(config: Config, tokenizer: Tokenizer) -> int | None:
    if config.algorithm.ciw_placeholder == "pad":
        return tokenizer.pad_id
    if tokenizer.unk_id is None and config.algorithm.ibpo_operator == "span-masking":
        raise ValueError("--ciw-placeholder unk: the tokenizer has no unknown token; use pad")
    return tokenizer.unk_id


def _checkpoint_bytes(config: Config) -> int:
    """Of all checkpoints that the run will keep; an upper bound, as if the shards held bf16."""
    assert config.model.hf_checkpoint is not None
    size = sum(file.stat().st_size for file in config.model.hf_checkpoint.glob("*.safetensors"))
    interval = config.run.save_interval or config.run.num_rollout
    kept = -(-config.run.num_rollout // interval)
    models = 2 if config.algorithm.advantages == "critic" else 1
    return models * kept * checkpoint_bytes(size // 2, bf16=config.model.bf16)


def _accelerators(config: Config, world: World, pool: EnginePool | None) -> int:
    """That the run holds: the trainers', and the engines' own where they do not share those."""
    if pool is None or config.rollout.colocate or world.device.type == "cpu":
        return world.size
    return world.size + pool.num_engines * config.rollout.rollout_num_gpus_per_engine


def _open_verifier(config: Config, world: World, stack: ExitStack) -> Any:
    """The verifier on the driver, None elsewhere; its error is everybody's."""
    verifier, error = None, None
    if world.is_driver:
        try:
            verifier = stack.enter_context(open_verifier(config.data))
        except Exception as caught:
            error = caught
    world.agree(error)
    return verifier


def _start_engines(config: Config, world: World, stack: ExitStack) -> EnginePool | None:
    """Engines on their way up, unless recorded rollouts are replayed."""
    if config.run.load_debug_rollout_data is not None:
        return None
    assert config.model.hf_checkpoint is not None
    pool = stack.enter_context(EnginePool(config, world, config.model.hf_checkpoint))
    pool.start()
    return pool


@contextmanager
def _failure_in_summary(reporter: Report | None) -> Iterator[None]:
    """A run that fails has a summary that says so."""
    try:
        yield
    except BaseException as error:
        if reporter is not None:
            reporter.finish(status=f"failed: {type(error).__name__}: {error}")
        raise
