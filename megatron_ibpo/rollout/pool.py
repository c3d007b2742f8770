"""All engines of a run as one: requests go to them in shares, weights to all, one death is mended."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from megatron_ibpo.config import Config
from megatron_ibpo.records import Sample, SampleRequest
from megatron_ibpo.rollout.engine import Engine
from megatron_ibpo.rollout.placement import place_engines
from megatron_ibpo.rollout.probe import compare_probes, probe
from megatron_ibpo.rollout.protocol import EngineDiedError, EngineError
from megatron_ibpo.rollout.settings import EngineSettings, engine_settings
from megatron_ibpo.weights.source import WeightSource
from megatron_ibpo.weights.transfer import Failures, Order, choose_transport, open_transport, update_engines
from megatron_ibpo.weights.transfer.link import ask
from megatron_ibpo.world import World

__all__ = ["EnginePool"]

ALLOWED_RESTARTS = 1

Reasons = dict[int, str]
"""By engine: how it died."""

log = logging.getLogger(__name__)


class EnginePool:
    """The engines of a run. Every method but `close` is collective: all trainer ranks call it alike.

    An engine that dies is started again once in a run, with the current weights, and samples its share
    again; the next death is an EngineError on every rank.
    """

    def __init__(self, config: Config, world: World, hf_dir: Path) -> None:
        """
        Args:
            hf_dir: checkpoint in Hugging Face format that the engines start from, as policy version 0.

        Raises:
            ValueError, OSError: the layout or the checkpoint does not serve.
        """
        rollout = config.rollout
        on_gpu = world.device.type == "cuda"
        self._rollout = rollout
        self._world = world
        self._logs = config.run.run_dir / "logs"
        self._places = place_engines(
            world.size,
            rollout.rollout_num_gpus_per_engine,
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world.size)),
            colocate=rollout.colocate,
            on_gpu=on_gpu,
        )
        transport = choose_transport(on_gpu=on_gpu, colocate=rollout.colocate)
        self._settings: dict[int, EngineSettings] = {
            place.index: engine_settings(
                rollout, hf_dir, transport, gpus=place.gpus, num_threads=torch.get_num_threads()
            )
            for place in self._places
        }
        self._transport = open_transport(
            transport,
            world,
            num_engines=len(self._places),
            workers_per_engine=rollout.rollout_num_gpus_per_engine,
            bucket_bytes=rollout.update_weight_buffer_size,
            timeout=rollout.update_weight_timeout,
        )
        self._mine: dict[int, Engine] = {}
        """The engines that this rank owns."""
        self._ready = False
        self._connected: set[int] = set()
        """Engines that the transport has met."""
        self._asleep = False
        self._source: WeightSource | None = None
        self._planned: tuple[Any, ...] = ()
        """The tensors, and who holds them, that the transport has planned for."""
        self._sent_bytes = self._needed_bytes = 0
        """Of the update in progress, on this rank."""
        self._version = 0
        self._restarts = 0

    @property
    def num_engines(self) -> int:
        return len(self._places)

    @property
    def policy_version(self) -> int:
        """Of the weights that the engines sample with."""
        return self._version

    @property
    def restarts(self) -> int:
        """Engines started again in this run because they died."""
        return self._restarts

    def start(self) -> None:
        """Start the engines' processes and return at once."""
        self._launch(self._everyone)

    def wait_ready(self) -> None:
        """Wait until every engine can be asked; the other methods do it themselves at first use.

        Raises:
            EngineStartError: on a rank whose engine did not start; RemoteError elsewhere.
        """
        if not self._ready:
            self._wait_for(self._everyone)
            self._ready = True

    def generate(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """One response for each request, in order, on every rank.

        Args:
            requests: the same on every rank.

        Raises:
            ValueError: a prompt is empty or leaves no room for a response.
            EngineError: an engine died and the run's restart is used up.
        """
        _check_prompts(requests, self._rollout.rollout_max_context_len)
        self.wait_ready()
        if self._asleep:
            self._tell("wake", "weights")
            self._tell("wake", "kv_cache")
            self._asleep = False
        shares = _shares(requests, len(self._places))
        responses, dead = self._sample(shares)
        if dead:
            self._restart(dead)
            again, dead = self._sample({index: shares[index] for index in dead})
            if dead:
                raise _give_up(dead)
            responses |= again
        return [response for index in shares for response in responses[index]]

    def update_weights(self, source: WeightSource, version: int) -> dict[str, float]:
        """Give all engines the weights of `source` as policy `version`, wake them, clear their caches.

        Returns:
            weight_update_seconds, weight_update_bytes (to all workers of all engines), and
            weight_update_bytes_ratio (those, over what the workers' shards take).

        Raises:
            WeightPlanError: the source's tensors are not those that the engines load.
            WeightMismatchError: with --check-weight-update-equal, other bytes arrived than were sent.
            EngineError: an engine died and the run's restart is used up.
        """
        self.wait_ready()
        began = time.monotonic()
        self._source, self._version = source, version
        self._sent_bytes = self._needed_bytes = 0
        plan = (source.metadata(), source.regions())
        if plan != self._planned:
            self._planned = plan
            self._connected.clear()
        dead = self._catch_up(self._everyone, sleeping=self._asleep)
        self._asleep = False
        if dead:
            self._restart(dict.fromkeys(self._everyone, "") | dead if self._transport.shared_group else dead)
        seconds = time.monotonic() - began
        traffic = self._world.all_gather((self._sent_bytes, self._needed_bytes))
        sent, needed = sum(sent for sent, _ in traffic), traffic[0][1]
        return {
            "weight_update_seconds": seconds,
            "weight_update_bytes": float(sent),
            "weight_update_bytes_ratio": sent / needed,
        }

    def check_against_fresh_engine(self, hf_dir: Path) -> None:
        """Compare engine 0 with one freshly loaded from `hf_dir`, which must hold the current weights.

        The fresh engine takes the place of engine 0, so that no two models need memory at once, and stays.

        Raises:
            WeightMismatchError: their greedy output, log-probs or kept tensors differ.
        """
        self.wait_ready()
        updated = self._world.on_driver(lambda: probe(self._mine[0], self._version))
        self._replace([0], hf_dir)
        fresh = self._world.on_driver(lambda: probe(self._mine[0], 0))
        compare_probes(updated, fresh)
        if dead := self._catch_up([0]):
            raise _give_up(dead)

    def sleep(self) -> None:
        """Let engines on the trainers' GPUs give back their memory; a rollout or update wakes them.

        Does nothing elsewhere: an idle engine uses no processor.
        """
        self.wait_ready()
        if not self._asleep and self._settings[0].sleep_mode:
            self._tell("sleep")
            self._asleep = True

    def close(self) -> None:
        """Stop this rank's engines. Not collective: it serves the way out after any failure."""
        for engine in self._mine.values():
            engine.close()
        self._mine.clear()

    def __enter__(self) -> EnginePool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _everyone(self) -> list[int]:
        return list(self._settings)

    def _launch(self, engines: Iterable[int], hf_dir: Path | None = None) -> None:
        """Start those of `engines` that are this rank's, from `hf_dir` where it is not the run's own."""
        for index in engines:
            if self._places[index].owner == self._world.rank:
                settings = self._settings[index]
                if hf_dir is not None:
                    settings = replace(settings, model=str(hf_dir))
                self._mine[index] = Engine(settings, self._logs / f"engine_{index}.log")

    def _wait_for(self, engines: Iterable[int]) -> None:
        """Wait until `engines` have started, or raise on every rank."""
        error: Exception | None = None
        try:
            for index in engines:
                if index in self._mine:
                    self._mine[index].wait_ready(self._rollout.vllm_start_timeout)
        except EngineError as caught:
            error = caught
        self._world.agree(error)

    def _sample(
        self, shares: Mapping[int, Sequence[SampleRequest]]
    ) -> tuple[dict[int, list[Sample]], Reasons]:
        """(responses by engine, engines that died), the same on every rank."""
        responses: dict[int, list[Sample]] = {}

        def sample(engines: Mapping[int, Engine]) -> Failures:
            failures: Failures = {}
            for index, engine in engines.items():
                try:
                    responses[index] = engine.generate(
                        shares[index], version=self._version, timeout=self._rollout.rollout_timeout
                    )
                except EngineDiedError as error:
                    failures[index] = error
            return failures

        dead = self._together(shares, sample)
        merged: dict[int, list[Sample]] = {}
        for part in self._world.all_gather(responses):
            merged |= part
        return merged, dead

    def _catch_up(self, engines: Iterable[int], *, sleeping: bool = False) -> Reasons:
        """Give `engines` the current weights; return those that died over it."""
        source = self._source
        if source is None:
            return {}
        if self._transport.shared_group:
            engines = self._everyone
        dead: Reasons = {}
        if strangers := [index for index in engines if index not in self._connected]:
            if self._transport.shared_group:
                strangers = self._everyone
            dead = self._together(strangers, lambda links: self._transport.connect(source, links, strangers))
            self._connected |= set(strangers) - set(dead)
        present = [index for index in engines if index not in dead]
        return dead | self._together(present, lambda links: self._send(source, links, present, sleeping))

    def _send(
        self, source: WeightSource, links: Mapping[int, Engine], engines: Sequence[int], sleeping: bool
    ) -> Failures:
        """One pass to `engines`; what it took is added up."""
        order = Order(
            version=self._version,
            sleeping=sleeping,
            check=self._rollout.check_weight_update_equal,
            timeout=self._rollout.update_weight_timeout,
        )
        sent = update_engines(self._transport, self._world, source, order, links, engines)
        self._sent_bytes += sent.num_bytes
        self._needed_bytes += sent.needed_bytes
        return sent.failures

    def _together(self, engines: Iterable[int], work: Callable[[Mapping[int, Engine]], Failures]) -> Reasons:
        """Run `work` on every rank with those of `engines` that it owns; all failures, on every rank."""
        failures: Failures = {}
        error: Exception | None = None
        try:
            failures = work({index: self._mine[index] for index in engines if index in self._mine})
        except Exception as caught:
            error = caught
        self._world.agree(error)
        reasons: Reasons = {}
        parts = self._world.all_gather({index: str(failure) for index, failure in failures.items()})
        for rank, part in enumerate(parts):
            for index, reason in part.items():
                if index not in reasons or self._places[index].owner == rank:  # its owner knows most
                    reasons[index] = reason
        return reasons

    def _restart(self, dead: Reasons) -> None:
        """Start dead engines again, with the current weights.

        Raises:
            EngineError: this run has done so before, or one died again over it.
        """
        if self._restarts >= ALLOWED_RESTARTS:
            raise _give_up(dead)
        self._restarts += 1
        if self._world.is_driver:
            log.warning("%s\nstarting it again with the current weights", _describe(dead))
        self._replace(list(dead))
        if dead_again := self._catch_up(list(dead)):
            raise _give_up(dead_again)

    def _replace(self, engines: Sequence[int], hf_dir: Path | None = None) -> None:
        """Fresh engines in the place of these, whether they live or not."""
        for index in engines:
            if index in self._mine:
                self._mine[index].close()
        self._connected -= set(self._everyone if self._transport.shared_group else engines)
        self._launch(engines, hf_dir)
        self._wait_for(engines)

    def _tell(self, method: str, *arguments: Any) -> None:
        """Ask this rank's engines; one that died over it is noticed when it is used next."""
        ask(self._mine, {}, self._rollout.update_weight_timeout, method, *arguments)


def _shares(requests: Sequence[SampleRequest], engines: int) -> dict[int, Sequence[SampleRequest]]:
    """Contiguous parts whose sizes differ by one at most; an engine without work is left out."""
    bounds = [len(requests) * index // engines for index in range(engines + 1)]
    shares = {index: requests[bounds[index] : bounds[index + 1]] for index in range(engines)}
    return {index: share for index, share in shares.items() if share}


def _check_prompts(requests: Sequence[SampleRequest], max_context: int | None) -> None:
    for number, request in enumerate(requests):
        length = len(request.prompt_token_ids)
        if length == 0:
            raise ValueError(f"request {number} has an empty prompt")
        if max_context is not None and length >= max_context:
            raise ValueError(
                f"request {number}: its prompt of {length} tokens leaves no room for a response in a context "
                f"of {max_context} (--rollout-max-context-len)"
            )


def _give_up(dead: Reasons) -> EngineError:
    return EngineError(f"{_describe(dead)}\nan engine is started again only once in a run")


def _describe(dead: Reasons) -> str:
    return "\n".join(f"engine {index} died: {reason}" for index, reason in dead.items())
