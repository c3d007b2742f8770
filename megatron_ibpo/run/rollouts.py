"""Sources of a run's samples and rewards: engines and verifiers, or a recording."""

from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from megatron_ibpo.basics.records import Group, Prompt, Sample, SampleRequest, TokenIds
from megatron_ibpo.config import Config
from megatron_ibpo.credit import (
    CreditContext,
    Operator,
    any_group,
    find_group_filter,
    is_informative,
    leaves_gradient,
    part_in_prompt,
)
from megatron_ibpo.data import PromptSource, ResponseText
from megatron_ibpo.data.row_prompts import with_system_prompt
from megatron_ibpo.engines import AsyncEngine
from megatron_ibpo.engines.probe import IdleEngine
from megatron_ibpo.environments import Sessions
from megatron_ibpo.evaluate import (
    Corrector,
    EvalRequest,
    EvalSample,
    EvalSet,
    KeptSamples,
    SetEvaluation,
    complete_samples,
    eval_sample,
    evaluate,
)
from megatron_ibpo.journal import ClosedBatch, LostStepError
from megatron_ibpo.report import load_step, rollout_path
from megatron_ibpo.rewards import Verifier
from megatron_ibpo.run.inputs import Judges, RunData
from megatron_ibpo.run.resolve import Foundation, ResolvedConfig
from megatron_ibpo.sampling.ahead import Ahead, Pace
from megatron_ibpo.sampling.episodes import Episodes
from megatron_ibpo.sampling.groups import (
    Batch,
    GroupSampler,
    JournalMemory,
    Rules,
    UnderWay,
    replay,
    sample_batch,
)
from megatron_ibpo.sampling.requests import group_requests, scorer
from megatron_ibpo.sampling.sampler import Sampler

T = TypeVar("T")


class Engines(Protocol):
    """The engines of a run, as the loop and the sampler use them: those of a cluster
    (`cluster.engines.Engines` says what each method does), or one in this process."""

    @property
    def version(self) -> int: ...
    @property
    def prefix_caching(self) -> bool: ...
    @property
    def count(self) -> int: ...
    @property
    def alive(self) -> int: ...
    @property
    def reproducible(self) -> bool: ...
    def clients(self) -> Sequence[AsyncEngine]: ...
    async def revive(self, index: int) -> AsyncEngine: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def admit(self) -> None: ...
    def update_weights(self, version: int) -> dict[str, float]: ...
    def meet_trainers(self) -> None: ...
    def idle(self, index: int) -> IdleEngine: ...
    def fresh(self, index: int, hf_dir: Path) -> AbstractContextManager[IdleEngine]: ...


@contextmanager
def open_rollouts(
    resolved: ResolvedConfig,
    data: RunData,
    engines: Engines | None,
    verifier: Verifier,
    memory: JournalMemory | None = None,
    state: dict[str, Any] | None = None,
    episodes: Episodes | None = None,
) -> "Iterator[Rollouts]":
    """Open rollouts by the engines; without engines, those of --load-debug-rollout-data.

    Args:
        memory: stores samples, and has those of an earlier process; None without training.
        state: state at the checkpoint to resume from (`LiveRollouts.state`).
        episodes: plays the episodes of prompts with an environment; None: no prompt has one.
    """
    config, foundation = resolved.config, resolved.foundation
    if engines is None:
        recorded = config.run.load_debug_rollout_data
        assert recorded is not None  # otherwise there are engines
        yield RecordedRollouts(recorded, foundation.method.operator)
        return
    sampler = Sampler(
        engines.clients(),
        scorer(verifier, ResponseText(data.tokenizer)),
        stall_timeout=config.rollout.engine_stall_timeout,
        max_context=foundation.max_context,
        prefix_caching=engines.prefix_caching,
        revive=engines.revive,
        episodes=episodes,
        needs_masks=memory is not None and bool(resolved.logprob_readers),
    )
    with sampler:
        yield LiveRollouts(config, foundation, data, engines, sampler, memory, state or {})


def open_episodes(config: Config, judges: Judges, sessions: Sessions | None) -> Episodes | None:
    """Return what plays the run's episodes; None if no prompt names an environment.

    Args:
        config: the configuration with everything resolved that depends on the devices.
        sessions: the places where environments run.
    """
    if sessions is None or judges.chat is None:
        return None
    return Episodes(
        sessions,
        judges.chat,
        config.environment,
        config.run.seed,
        config.data.reward_threshold,
        config.rollout.rollout_max_context_len,
        partial(with_system_prompt, data=config.data),
    )


@dataclass
class RecordedRollouts:
    """Groups that --save-debug-rollout-data saved, one file per step."""

    directory: Path
    operator: Operator
    sampled: list[Sample] = field(default_factory=list)
    """No samples: a replay costs no sampling."""
    metrics: dict[str, float] = field(default_factory=dict)

    def groups(
        self, step: int, context: CreditContext, meanwhile: Callable[[], None] | None = None
    ) -> list[Group]:
        """Return groups as `LiveRollouts`. Raises ValueError if the recording is incomplete."""
        recorded = load_step(rollout_path(self.directory, step + 1))
        return replay(recorded.groups, self.operator, context)

    def past(self, steps: range, context: Callable[[int], CreditContext]) -> Iterator[list[Group]]:
        return (self.groups(step, context(step)) for step in steps)

    def advance(self, version: int) -> None:
        """No-op: a recording has no engines."""

    def state(self) -> dict[str, Any]:
        return {}

    def evaluation(
        self,
        data: RunData,
        meanwhile: Callable[[], None] | None = None,
        stored_samples: KeptSamples | None = None,
    ) -> list[SetEvaluation]:
        raise ValueError(
            "held-out prompts cannot be evaluated with --load-debug-rollout-data: no engine runs"
        )


@dataclass
class LiveRollouts:
    """Rollouts sampled now, or ahead of training (--max-staleness, --over-sampling-batch-size)."""

    config: Config
    foundation: Foundation
    data: RunData
    fleet: Engines
    sampler: Sampler
    memory: JournalMemory | None = None
    loaded: dict[str, Any] = field(default_factory=dict)
    """State of the rollouts at the checkpoint that the run resumes from."""
    _ahead: Ahead | None = None
    _under_way: UnderWay = field(init=False)
    sampled: list[Sample] = field(default_factory=list)
    """All samples of the last groups, in an order that does not depend on which finished first."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last groups."""

    def __post_init__(self) -> None:
        """Resume the sampling that was under way at the checkpoint; a new run has none."""
        none_open = {"cursor": self.loaded.get("step", 0) * self._batch_size, "open": []}
        stored = self.loaded.get("sampling", none_open)
        self._under_way = UnderWay(stored["cursor"], {(index, attempt) for index, attempt in stored["open"]})

    def groups(
        self, step: int, context: CreditContext, meanwhile: Callable[[], None] | None = None
    ) -> list[Group]:
        """Return the groups of the step after `step` completed ones, scored and with their corrections.
        Raises the errors of `sample_batch` and `Ahead.batch`.

        Args:
            meanwhile: called from time to time while waiting for them.
        """
        self.sampler.version = self.fleet.version
        memory = self.memory
        if memory is not None and (closed := memory.batch(step + 1)) is not None:
            # an earlier process sampled these, but did not save the training on them
            recorded = self._recorded(closed, memory, context)
            self._under_way.close(closed)
            self.sampled = [sample for group in recorded for sample in group.samples]
            self.metrics = {"groups_replayed": float(len(recorded))}
            return recorded
        groups = GroupSampler(self.sampler, self.foundation.method.operator, self._rules(), memory)
        sample = self._sample_synchronous if self._pace is None else self._sample_ahead
        batch = sample(step, groups, context, meanwhile)
        self.sampled = batch.sampled
        self.metrics = self.sampler.take_metrics() | batch.metrics
        if memory is not None:
            self._under_way.close(memory.close(step + 1, batch))
        return batch.groups

    def _recorded(self, closed: ClosedBatch, memory: JournalMemory, context: CreditContext) -> list[Group]:
        """Return a batch from the journal."""

        def draw(position: int) -> tuple[Prompt, CreditContext]:
            if self._pace is None:
                return self._prompts.at(position), context
            prompt, _, draw_context = self._drawn(context, position, 0)
            return prompt, draw_context

        return memory.groups(closed, draw, self.foundation.method.operator)

    def past(self, steps: range, context: Callable[[int], CreditContext]) -> Iterator[list[Group]]:
        """Yield the groups of steps that `groups` has returned before, unchanged. Raises LostStepError if the
        journal lacks one of the steps.

        Args:
            context: completed steps → the context of the next one.
        """
        assert self.memory is not None
        memory = self.memory.view_after(steps.start)
        for step in steps:
            if (closed := memory.batch(step + 1)) is None:
                raise LostStepError(
                    f"the trainers need step {step + 1} again, and the journal does not hold it; start "
                    "the run again"
                )
            yield self._recorded(closed, memory, context(step))

    def advance(self, version: int) -> None:
        """Note that the engines now have the weights of policy `version`."""
        self.sampler.version = version
        if self._ahead is not None:
            self.sampler.wait(self.sampler.start(self._ahead.advance(version)))

    def state(self) -> dict[str, Any]:
        """Return the present state as JSON for a checkpoint; `open_rollouts` takes it back."""
        return {} if self._pace is None else {"sampling": self._under_way.as_json()}

    @property
    def _batch_size(self) -> int:
        return self.config.rollout.rollout_batch_size

    @property
    def _pace(self) -> Pace | None:
        """Pace for sampling ahead; None if each step's groups are sampled when it begins."""
        rollout = self.config.rollout
        over = (rollout.over_sampling_batch_size or 0) - rollout.rollout_batch_size
        if rollout.max_staleness == 0 and over <= 0:
            return None
        return Pace(rollout.max_staleness, max(0, over), rollout.keep_order, self.config.run.num_rollout)

    def _sample_synchronous(
        self, step: int, groups: GroupSampler, context: CreditContext, meanwhile: Callable[[], None] | None
    ) -> Batch:
        rounds = groups.rules.max_rounds

        def draw(number: int) -> list[tuple[Prompt, Sequence[SampleRequest]]]:
            batch, size = step * rounds + number, self._batch_size
            return [(prompt, self._requests(prompt, step)) for prompt in self._prompts.batch(batch, size)]

        batch = self.sampler.run(sample_batch(groups, draw, context), meanwhile)
        return batch if rounds > 1 else replace(batch, metrics={})

    def _sample_ahead(
        self, step: int, groups: GroupSampler, context: CreditContext, meanwhile: Callable[[], None] | None
    ) -> Batch:
        pace = self._pace
        assert pace is not None
        if self._ahead is None:
            # credit's requests to the policy belong to the thread that trains it
            plain = replace(context, logprobs=None, values=None)
            self._ahead = Ahead(groups, partial(self._drawn, plain), pace, version=step)
            self.sampler.wait(self.sampler.start(self._ahead.resume(*self._groups_in_flight(step))))
        batch = self.sampler.wait(self.sampler.start(self._ahead.batch()), meanwhile)
        if pace.staleness == 0:
            self.sampler.run(self.sampler.settle())  # nothing is in flight now
        return batch

    def _groups_in_flight(self, step: int) -> tuple[int, list[tuple[int, int, int]]]:
        """Return the groups that an earlier process left in flight, for `Ahead.resume`."""
        oldest = {} if self.memory is None else self.memory.open_groups()
        self._under_way.ask(index for index, _ in oldest)
        in_flight = [(*group, oldest.get(group, step)) for group in sorted(self._under_way.open)]
        return self._under_way.cursor, in_flight

    def _drawn(
        self, context: CreditContext, ordinal: int, attempt: int
    ) -> tuple[Prompt, Sequence[SampleRequest], CreditContext]:
        """Return a prompt with its requests and the context for drawing its corrections, both as in the step
        of its place in the order."""
        prompt = self._prompts.at(ordinal)
        step = ordinal // self._batch_size
        return prompt, self._requests(prompt, step, attempt), replace(context, step=step)

    def evaluation(
        self,
        data: RunData,
        meanwhile: Callable[[], None] | None = None,
        stored_samples: KeptSamples | None = None,
    ) -> list[SetEvaluation]:
        """Evaluate the policy on every set of held-out prompts. Raises the errors of `evaluate`,
        `Sampler.answer` and `KeptSamples.add`.

        Args:
            stored_samples: stored samples to reuse; takes every new sample.
        """
        self.sampler.version = self.fleet.version
        evaluated = [self._evaluated(eval_set, meanwhile, stored_samples) for eval_set in data.eval_sets]
        self.sampler.take_metrics()  # only training's metrics are shown
        return evaluated

    def observed(
        self, ask: Callable[[Sampler], Coroutine[Any, Any, T]], meanwhile: Callable[[], None] | None = None
    ) -> T:
        """Run an instrument's requests between steps, without any effect on a step's metrics. Raises the
        errors of `ask`."""
        self.sampler.version = self.fleet.version
        result = self.sampler.run(ask(self.sampler), meanwhile)
        self.sampler.take_metrics()
        return result

    def _evaluated(
        self, eval_set: EvalSet, meanwhile: Callable[[], None] | None, stored_samples: KeptSamples | None
    ) -> SetEvaluation:
        evaluation, samples = evaluate(
            eval_set.prompts,
            partial(
                complete_samples,
                stored={} if stored_samples is None else stored_samples.stored(eval_set.name),
                ask=partial(self._ask_evaluated, eval_set, meanwhile),
                add=(lambda _: None) if stored_samples is None else stored_samples.add,
            ),
            eval_set.sampling,
            seed=self.config.run.seed,
            has_answers=eval_set.answer is not None,
            corrector=self._corrector() if self.config.run.eval_compare_and_correct else None,
        )
        return SetEvaluation(eval_set, evaluation, samples)

    def _ask_evaluated(
        self,
        eval_set: EvalSet,
        meanwhile: Callable[[], None] | None,
        requests: Sequence[EvalRequest],
        add: Callable[[int, EvalSample], None],
    ) -> None:
        corrects, read = self.config.run.eval_compare_and_correct, ResponseText(self.data.tokenizer)

        def scored(index: int, sample: Sample) -> None:
            request = requests[index]
            response = read(request.prompt, sample)
            keep_tokens = corrects and request.key[0] == "sampled"
            add(
                index,
                eval_sample(
                    eval_set.name, request, sample, response, eval_set.answer, keep_tokens=keep_tokens
                ),
            )

        work = self.sampler.answer_all(
            [(request.prompt, request.request) for request in requests], scored, held_out=True
        )
        if self._pace is None:
            self.sampler.run(work, meanwhile)
        else:
            self.sampler.wait(self.sampler.start(work), meanwhile)  # training's requests continue beside them

    def _rules(self) -> Rules:
        algorithm = self.config.algorithm
        chooses = algorithm.dynamic_sampling or algorithm.group_filter is not None
        return Rules(
            num_groups=self.config.rollout.rollout_batch_size,
            max_rounds=algorithm.dynamic_sampling_rounds if chooses else 1,
            usable=find_group_filter(algorithm),
            preferred=is_informative if algorithm.dynamic_sampling else any_group,
            after_credit=leaves_gradient if algorithm.dynamic_sampling_by == "credit" else None,
        )

    @property
    def _prompts(self) -> PromptSource:
        assert self.data.prompts is not None  # only a replay has none
        return self.data.prompts

    def prompts_of_later_steps(self, count: int) -> list[Prompt]:
        """Return the first training prompts that are not sampled before the first update, so that no engine
        has them in its cache when training samples them."""
        rules, rollout = self._rules(), self.config.rollout
        batch = max(rules.num_groups, rollout.over_sampling_batch_size or 0)
        first = (1 + rollout.max_staleness) * rules.max_rounds * batch
        return [self._prompts.at(position) for position in range(first, first + count)]

    def _requests(self, prompt: Prompt, step: int, attempt: int = 0) -> list[SampleRequest]:
        """Return the requests for a prompt's responses."""
        return group_requests(
            [prompt],
            self.config.rollout,
            seed=self.config.run.seed,
            step=step,
            attempt=attempt,
            prompt_ids=self.data.suffixes,
        )

    def _corrector(self) -> Corrector:
        vocabulary, foundation = self.data.vocabulary, self.foundation

        def prompt_ids(prompt: Prompt, candidates: Sequence[Sample]) -> TokenIds:
            wrong, *references = [
                part_in_prompt(candidate, vocabulary.thinking).ids for candidate in candidates
            ]
            return vocabulary.correction_prompt(prompt, wrong, references)

        return Corrector(prompt_ids, foundation.method.operator.ibpo_k, foundation.max_context)


Rollouts = LiveRollouts | RecordedRollouts
"""A source of samples for the loop."""
