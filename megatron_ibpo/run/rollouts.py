"""Sources of a run's samples and rewards: engines and verifiers, or a recording."""

from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
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
    find_operator,
    is_informative,
    leaves_gradient,
    shown,
)
from megatron_ibpo.data import PromptSource
from megatron_ibpo.engines import AsyncEngine
from megatron_ibpo.evaluate import (
    Asked,
    Corrector,
    EvalSample,
    EvalSet,
    KeptSamples,
    SetEvaluation,
    answered,
    eval_sample,
    evaluate,
)
from megatron_ibpo.journal import ClosedBatch, LostStepError
from megatron_ibpo.report import load_groups, rollout_path
from megatron_ibpo.rewards import Verifier
from megatron_ibpo.run.run_data import RunData
from megatron_ibpo.sampling.ahead import Ahead, Pace
from megatron_ibpo.sampling.groups import Batch, GroupSampler, Rules, sample_batch
from megatron_ibpo.sampling.journal_memory import JournalMemory, UnderWay
from megatron_ibpo.sampling.replay import replay
from megatron_ibpo.sampling.requests import group_requests
from megatron_ibpo.sampling.sampler import Sampler
from megatron_ibpo.sampling.scoring import scorer

T = TypeVar("T")


class Fleet(Protocol):
    """The engines of a run, as the sampler needs them."""

    @property
    def version(self) -> int:
        """Version of the policy whose weights the engines have."""
        ...

    @property
    def prefix_caching(self) -> bool:
        """True where engines compute the shared beginning of a prompt's requests once."""
        ...

    def clients(self) -> Sequence[AsyncEngine]:
        """Return all engines, by index."""
        ...

    async def revive(self, index: int) -> AsyncEngine:
        """A new engine in the place of one that died, once it has the present weights; EngineError where
        there is none."""
        ...


class Rollouts(Protocol):
    """A source of samples for the loop."""

    def groups(
        self, step: int, context: CreditContext, meanwhile: Callable[[], None] | None = None
    ) -> list[Group]:
        """The groups of the step after `step` completed ones: scored, and with their corrections.

        Args:
            meanwhile: called every so often while they are waited for.
        """
        ...

    def past(self, steps: range, context: Callable[[int], CreditContext]) -> Iterator[list[Group]]:
        """The groups of steps that `groups` has given before, as they were.

        Args:
            context: of the step after so many completed ones.
        """
        ...

    def advance(self, version: int) -> None:
        """The engines have the weights of policy `version` now."""
        ...

    def state(self) -> dict[str, Any]:
        """JSON for a checkpoint of this moment; comes back to `open_rollouts`."""
        ...

    def sampled(self) -> list[Sample]:
        """Return all samples of the last groups, in an order that does not depend on which finished first."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last groups."""
        ...

    def evaluation(
        self, data: RunData, meanwhile: Callable[[], None] | None = None, kept: KeptSamples | None = None
    ) -> list[SetEvaluation]:
        """The policy on every set of held-out prompts.

        Args:
            kept: has what was sampled before, and takes every new sample.
        """
        ...


@contextmanager
def open_rollouts(
    config: Config,
    data: RunData,
    engines: Fleet | None,
    verifier: Verifier,
    memory: JournalMemory | None = None,
    state: dict[str, Any] | None = None,
) -> Iterator[Rollouts]:
    """Rollouts by the engines; without engines, those that --load-debug-rollout-data names.

    Args:
        memory: keeps what is sampled, and has what an earlier process sampled; None where nothing is trained.
        state: of the checkpoint that the run goes on from (`Rollouts.state`).
    """
    if engines is None:
        recorded = config.run.load_debug_rollout_data
        assert recorded is not None  # else there are engines
        yield RecordedRollouts(recorded)
        return
    sampler = Sampler(
        engines.clients(),
        scorer(verifier, lambda _, sample: data.tokenizer.decode(sample.token_ids)),
        stall_timeout=config.rollout.engine_stall_timeout,
        max_context=config.rollout.rollout_max_context_len,
        prefix_caching=engines.prefix_caching,
        revive=engines.revive,
    )
    with sampler:
        yield LiveRollouts(config, data, engines, sampler, memory, state or {})


@dataclass
class RecordedRollouts:
    """The groups that --save-debug-rollout-data kept, one file for each step."""

    directory: Path

    def groups(
        self, step: int, context: CreditContext, meanwhile: Callable[[], None] | None = None
    ) -> list[Group]:
        """See `Rollouts`. Raises ValueError where the recording lacks something."""
        _, groups = load_groups(rollout_path(self.directory, step + 1))
        return replay(groups, find_operator(context.algorithm), context)

    def past(self, steps: range, context: Callable[[int], CreditContext]) -> Iterator[list[Group]]:
        return (self.groups(step, context(step)) for step in steps)

    def advance(self, version: int) -> None:
        """A recording is what it is."""

    def state(self) -> dict[str, Any]:
        return {}

    def sampled(self) -> list[Sample]:
        """None: a replay costs no sampling."""
        return []

    def metrics(self) -> dict[str, float]:
        return {}

    def evaluation(
        self, data: RunData, meanwhile: Callable[[], None] | None = None, kept: KeptSamples | None = None
    ) -> list[SetEvaluation]:
        raise ValueError("recorded rollouts cannot be asked about held-out prompts: there is no engine")


@dataclass
class LiveRollouts:
    """Rollouts sampled now, or ahead of training (--max-staleness, --over-sampling-batch-size)."""

    config: Config
    data: RunData
    fleet: Fleet
    sampler: Sampler
    memory: JournalMemory | None = None
    loaded: dict[str, Any] = field(default_factory=dict)
    """State of the rollouts at the checkpoint that the run resumes from."""
    _ahead: Ahead | None = None
    _under_way: UnderWay | None = None
    _sampled: list[Sample] = field(default_factory=list)
    _metrics: dict[str, float] = field(default_factory=dict)

    def groups(
        self, step: int, context: CreditContext, meanwhile: Callable[[], None] | None = None
    ) -> list[Group]:
        """See `Rollouts`. Raises what `sample_batch` and `Ahead.batch` raise."""
        self.sampler.version = self.fleet.version
        operator, memory = find_operator(context.algorithm), self.memory
        if self._under_way is None:
            found = self.loaded.get("sampling", {"cursor": step * self._batch_size, "open": []})
            self._under_way = UnderWay(
                found["cursor"], {(index, attempt) for index, attempt in found["open"]}
            )
        if memory is not None and (closed := memory.batch(step + 1)) is not None:
            return self._again(closed, memory, operator, context)
        groups = GroupSampler(self.sampler, operator, self._rules(), memory)
        sample = self._now if self._pace is None else self._next
        batch = sample(step, groups, context, meanwhile)
        self._sampled = batch.sampled
        self._metrics = self.sampler.take_metrics() | batch.metrics
        if memory is not None:
            self._under_way.close(memory.close(step + 1, batch))
        return batch.groups

    def _again(
        self, closed: ClosedBatch, memory: JournalMemory, operator: Operator, context: CreditContext
    ) -> list[Group]:
        """The groups that an earlier process sampled and had not saved the training on."""
        assert self._under_way is not None
        groups = self._recorded(closed, memory, operator, context)
        self._under_way.close(closed)
        self._sampled = [sample for group in groups for sample in group.samples]
        self._metrics = {"groups_replayed": float(len(groups))}
        return groups

    def _recorded(
        self, closed: ClosedBatch, memory: JournalMemory, operator: Operator, context: CreditContext
    ) -> list[Group]:
        """A batch as the journal has it."""

        def draw(position: int) -> tuple[Prompt, CreditContext]:
            if self._pace is None:
                return self._prompts.at(position), context
            prompt, _, own = self._drawn(context, position, 0)
            return prompt, own

        return memory.groups(closed, draw, operator)

    def past(self, steps: range, context: Callable[[int], CreditContext]) -> Iterator[list[Group]]:
        """See `Rollouts`. Raises LostStepError where the journal does not hold one of them."""
        assert self.memory is not None
        memory = self.memory.after(steps.start)
        for step in steps:
            if (closed := memory.batch(step + 1)) is None:
                raise LostStepError(
                    f"the journal does not hold step {step + 1}, which is to be trained again; "
                    "start the run again"
                )
            own = context(step)
            yield self._recorded(closed, memory, find_operator(own.algorithm), own)

    def advance(self, version: int) -> None:
        self.sampler.version = version
        if self._ahead is not None:
            self.sampler.wait(self.sampler.start(self._ahead.advance(version)))

    def state(self) -> dict[str, Any]:
        if self._pace is None or self._under_way is None:
            return {}
        return {"sampling": self._under_way.as_json()}

    @property
    def _batch_size(self) -> int:
        return self.config.rollout.rollout_batch_size

    @property
    def _pace(self) -> Pace | None:
        """Return how far sampling runs ahead; None where each step's groups are sampled when it begins."""
        rollout = self.config.rollout
        over = (rollout.over_sampling_batch_size or 0) - rollout.rollout_batch_size
        if rollout.max_staleness == 0 and over <= 0:
            return None
        return Pace(rollout.max_staleness, max(0, over), rollout.keep_order, self.config.run.num_rollout)

    def _now(
        self,
        step: int,
        groups: GroupSampler,
        context: CreditContext,
        meanwhile: Callable[[], None] | None,
    ) -> Batch:
        rounds = groups.rules.max_rounds

        def draw(number: int) -> list[tuple[Prompt, Sequence[SampleRequest]]]:
            batch, size = step * rounds + number, self._batch_size
            return [(prompt, self._requests(prompt, step)) for prompt in self._prompts.batch(batch, size)]

        batch = self.sampler.run(sample_batch(groups, draw, context), meanwhile)
        return batch if rounds > 1 else replace(batch, metrics={})

    def _next(
        self,
        step: int,
        groups: GroupSampler,
        context: CreditContext,
        meanwhile: Callable[[], None] | None,
    ) -> Batch:
        pace = self._pace
        assert pace is not None
        if self._ahead is None:
            # credit's questions to the policy are for the thread that trains it
            plain = replace(context, logprobs=None, values=None)
            self._ahead = Ahead(groups, partial(self._drawn, plain), pace, version=step)
            self.sampler.wait(self.sampler.start(self._ahead.resume(*self._left(step))))
        batch = self.sampler.wait(self.sampler.start(self._ahead.batch()), meanwhile)
        if pace.staleness == 0:
            self.sampler.run(self.sampler.settle())  # nothing is under way now
        return batch

    def _left(self, step: int) -> tuple[int, list[tuple[int, int, int]]]:
        """Return what an earlier process left under way, for `Ahead.resume`."""
        assert self._under_way is not None
        oldest = {} if self.memory is None else self.memory.open_groups()
        self._under_way.ask(index for index, _ in oldest)
        left = [(*group, oldest.get(group, step)) for group in sorted(self._under_way.open)]
        return self._under_way.cursor, left

    def _drawn(
        self, context: CreditContext, ordinal: int, attempt: int
    ) -> tuple[Prompt, Sequence[SampleRequest], CreditContext]:
        """A prompt with its requests, and what its corrections are drawn by: as the step would have it that
        its place in the order belongs to."""
        prompt = self._prompts.at(ordinal)
        step = ordinal // self._batch_size
        return prompt, self._requests(prompt, step, attempt), replace(context, step=step)

    def sampled(self) -> list[Sample]:
        return self._sampled

    def metrics(self) -> dict[str, float]:
        return self._metrics

    def evaluation(
        self, data: RunData, meanwhile: Callable[[], None] | None = None, kept: KeptSamples | None = None
    ) -> list[SetEvaluation]:
        """See `Rollouts`. Raises what `evaluate`, `Sampler.answer` and `KeptSamples.add` raise."""
        self.sampler.version = self.fleet.version
        evaluated = [self._evaluated(own, meanwhile, kept) for own in data.eval_sets]
        self.sampler.take_metrics()  # those of training are shown
        return evaluated

    def observed(
        self,
        ask: Callable[[Sampler], Coroutine[Any, Any, T]],
        meanwhile: Callable[[], None] | None = None,
    ) -> T:
        """Ask for an instrument between steps. No step's metrics show it. Raises what `ask` raises."""
        self.sampler.version = self.fleet.version
        found = self.sampler.run(ask(self.sampler), meanwhile)
        self.sampler.take_metrics()
        return found

    def _evaluated(
        self, own: EvalSet, meanwhile: Callable[[], None] | None, kept: KeptSamples | None
    ) -> SetEvaluation:
        evaluation, samples = evaluate(
            own.prompts,
            partial(
                answered,
                found={} if kept is None else kept.found(own.name),
                ask=partial(self._ask_evaluated, own, meanwhile),
                add=(lambda _: None) if kept is None else kept.add,
            ),
            own.sampling,
            seed=self.config.run.seed,
            has_answers=own.answer is not None,
            corrector=self._corrector() if self.config.run.eval_compare_and_correct else None,
        )
        return SetEvaluation(own, evaluation, samples)

    def _ask_evaluated(
        self,
        own: EvalSet,
        meanwhile: Callable[[], None] | None,
        asked: Sequence[Asked],
        each: Callable[[int, EvalSample], None],
    ) -> None:
        corrects, decode = self.config.run.eval_compare_and_correct, self.data.tokenizer.decode

        def scored(index: int, sample: Sample) -> None:
            one, text = asked[index], decode(sample.token_ids)
            keep_tokens = corrects and one.key[0] == "sampled"
            each(index, eval_sample(own.name, one, sample, text, own.answer, keep_tokens=keep_tokens))

        work = self.sampler.answers([(one.prompt, one.request) for one in asked], scored)
        if self._pace is None:
            self.sampler.run(work, meanwhile)
        else:
            self.sampler.wait(self.sampler.start(work), meanwhile)  # training's go on beside them

    def _rules(self) -> Rules:
        algorithm = self.config.algorithm
        chooses = algorithm.dynamic_sampling or algorithm.group_filter is not None
        return Rules(
            wanted=self.config.rollout.rollout_batch_size,
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
        """The first prompts of training that are not asked before the first update, so that no engine has
        them in its cache when training asks them."""
        rules, rollout = self._rules(), self.config.rollout
        batch = max(rules.wanted, rollout.over_sampling_batch_size or 0)
        first = (1 + rollout.max_staleness) * rules.max_rounds * batch
        return [self._prompts.at(position) for position in range(first, first + count)]

    def _requests(self, prompt: Prompt, step: int, attempt: int = 0) -> list[SampleRequest]:
        """The requests of a prompt's responses."""
        return group_requests(
            [prompt],
            self.config.rollout,
            seed=self.config.run.seed,
            step=step,
            attempt=attempt,
            prompt_ids=self.data.suffixes,
        )

    def _corrector(self) -> Corrector:
        vocabulary, limit = self.data.vocabulary, self.config.rollout.rollout_max_context_len
        assert limit is not None  # start-up resolved it

        def prompt_ids(prompt: Prompt, candidates: Sequence[Sample]) -> TokenIds:
            first, *others = [shown(candidate, vocabulary.thinking).ids for candidate in candidates]
            return vocabulary.correction_prompt(prompt, first, others)

        return Corrector(prompt_ids, find_operator(self.config.algorithm).ibpo_k, limit)
