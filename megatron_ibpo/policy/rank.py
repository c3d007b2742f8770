"""One trainer process: a rank of Megatron's world, with what the driver asks of it.

All ranks are asked the same at the same time, each with its own share of the data. What a method returns is
small, or this rank's own share again.
"""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_ibpo.basics.distributed import World, start_world
from megatron_ibpo.basics.records import Floats
from megatron_ibpo.config import Config
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.models.backends import find_backends, served_by
from megatron_ibpo.policy import parallel
from megatron_ibpo.policy.adapters import merged_values, offered_adapters
from megatron_ibpo.policy.checkpoint import load_checkpoint
from megatron_ibpo.policy.critic import Critic
from megatron_ibpo.policy.gradient_meter import compare_with_gspo
from megatron_ibpo.policy.model import build_model, build_value_model
from megatron_ibpo.policy.mtp_model import build_mtp
from megatron_ibpo.policy.planning import RankForward, RankMeasure, RankUpdate
from megatron_ibpo.policy.reference import load_reference
from megatron_ibpo.policy.reports import About, Sent
from megatron_ibpo.policy.residence import Held, Residence
from megatron_ibpo.policy.saving import Order as SaveOrder
from megatron_ibpo.policy.saving import Saver
from megatron_ibpo.policy.trainer import Trainer
from megatron_ibpo.weights.formats.load import load_hf, load_mtp
from megatron_ibpo.weights.formats.retention import Keep
from megatron_ibpo.weights.formats.save import save_hf
from megatron_ibpo.weights.layout.export import HFExport
from megatron_ibpo.weights.transfer.link import EngineLink
from megatron_ibpo.weights.transfer.update import Transport, open_transport, update_engines
from megatron_ibpo.weights.transfer.update_order import Order, TransportName, drafts_with_own_layer


class TrainerRank:
    """This rank's part of the policy (and of the critic), and its way to the engines."""

    def __init__(self, config: Config, checkpoint: Path | None) -> None:
        """Join the other ranks, build, and load the weights. Collective, as everything here.

        Args:
            checkpoint: to go on from; else the weights of --hf-checkpoint.

        Raises:
            ValueError, OSError: a layout, checkpoint or model that does not serve, or a machine that lacks a
                library.
        """
        assert config.model.hf_checkpoint is not None  # check_config saw to it
        self.config = config
        shape = read_hf_config(config.model.hf_checkpoint)
        self.libraries = find_backends(
            shape,
            on_gpu=torch.cuda.is_available(),
            allow_local=config.model.allow_local_modules,
            bf16=config.model.bf16,
        )
        self.world: World = start_world(config.parallel.distributed_timeout_minutes)
        if config.optimizer.optimizer_cpu_offload and self.world.device.type == "cuda":
            # the optimizer's steps are the processors' then; not run on GPUs
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            torch.set_num_threads(max(torch.get_num_threads(), len(os.sched_getaffinity(0)) // ranks))
        parallel.initialize(config.parallel, self.world, config.run.seed)
        chunks = build_model(shape, config, device=self.world.device_type, libraries=self.libraries)
        load_hf(chunks, shape, config.model.hf_checkpoint)
        mtp = None
        if config.model.mtp_num_layers:
            mtp = build_mtp(shape, config, device=self.world.device_type, libraries=self.libraries)
            load_mtp(mtp, chunks, shape, config.model.hf_checkpoint)
        values = merged_values(chunks)
        # an engine that does not draft has no place for the layer
        drafts = mtp is not None and drafts_with_own_layer(config.rollout.vllm_arg)
        self.export = HFExport(chunks, shape, mtp=mtp if drafts else None, values=values)
        self.whole_export = HFExport(chunks, shape, mtp=mtp, values=values)
        """Export of everything that files hold."""
        adapters = offered_adapters(chunks, shape, config.model)
        updates = config.run.num_rollout * config.loss.num_steps_per_rollout
        reference = None
        if config.loss.kl_coef > 0:
            reference = load_reference(chunks, shape, config.model.ref_load)
        self.trainer = Trainer(chunks, shape.vocab_size, config, self.world, updates, reference, mtp)
        self.critic = self._build_critic(updates)
        self.saver = Saver(self.world, adapters)
        self.notes: tuple[str, ...] = ()
        if checkpoint is not None:
            self.notes = load_checkpoint(self.trainer, checkpoint, self.critic)
        trained = [own for own in (self.trainer, self.trainer.mtp, self.critic) if own is not None]
        offload = config.rollout.colocate and config.rollout.offload_train
        self.residence = Residence(trained, self.world, offload=offload)
        self.transport: Transport | None = None

    def about(self) -> About:
        assert self.config.model.hf_checkpoint is not None
        parameters = sum(math.prod(meta.shape) for meta in self.export.metadata())
        shape = read_hf_config(self.config.model.hf_checkpoint)
        layers = served_by(shape, self.libraries, bf16=bool(self.config.model.bf16))
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        return About(parameters, str(self.trainer.loss_backend), layers, device, self.notes)

    def update(self, work: RankUpdate) -> dict[str, float]:
        """The policy's optimizer steps of one rollout."""
        self.residence.bring_for_steps()
        return self.trainer.update(work)

    def update_critic(self, work: RankUpdate) -> dict[str, float]:
        """The critic's."""
        assert self.critic is not None
        self.residence.bring_for_steps()
        return self.critic.update(work)

    def logprobs(self, work: RankForward) -> list[tuple[int, Floats]]:
        """(index of the sequence, log-probs of its response tokens); nothing on ranks that do not report."""
        self.residence.bring(Held.WEIGHTS)
        return self.trainer.logprobs(work)

    def values(self, work: RankForward) -> list[tuple[int, Floats]]:
        """(index of the sequence, what the critic expects before each response token)."""
        assert self.critic is not None
        self.residence.bring(Held.WEIGHTS)
        return self.critic.values(work)

    def measure_gradient(self, work: RankMeasure) -> dict[str, float]:
        """Return how noisy the gradient is over prompts, and GSPO's gradient on the same responses."""
        self.residence.bring(Held.EVERYTHING)
        return compare_with_gspo(self.trainer, work)

    def save(self, directory: Path, step: int, run_state: dict[str, Any], keep: Keep) -> None:
        """Begin a Megatron checkpoint under `directory`, as `policy.group` leads it on; see `Saver`."""
        self.residence.bring(Held.EVERYTHING)
        self.saver.begin(self.trainer, SaveOrder(directory, step, run_state, keep), self.critic)

    def save_rests(self, wait: bool) -> bool:
        """Return whether this rank writes nothing any more; with `wait`, wait until it does not. Not
        collective."""
        return self.saver.rests(wait=wait)

    def seal_save(self) -> None:
        """Make one checkpoint of what all ranks have written, and begin to give it its name."""
        self.saver.seal()

    def end_save(self) -> None:
        """Raises what went wrong with that."""
        self.saver.end()

    def save_hf(self, directory: Path) -> None:
        """The policy in Hugging Face format."""
        assert self.config.model.hf_checkpoint is not None
        with self.residence.visited():
            save_hf(
                self.whole_export,
                self.world,
                directory,
                self.config.model.hf_checkpoint,
                self.saver.adapters,
            )

    def make_room(self) -> None:
        """Leave the device to engines that share it; what is done next brings back what it needs."""
        self.residence.leave(Held.NOTHING)

    def open_transport(self, name: TransportName) -> None:
        """Get ready to send weights; before `connect`."""
        rollout = self.config.rollout
        self.transport = open_transport(
            name,
            self.world,
            workers_per_engine=rollout.rollout_num_gpus_per_engine,
            bucket_bytes=rollout.update_weight_buffer_size,
            timeout=rollout.update_weight_timeout,
        )

    def connect(self, links: Mapping[int, EngineLink], engines: Sequence[int]) -> dict[int, str]:
        """Meet `engines`, of which this rank speaks with those in `links`; why those that failed did."""
        assert self.transport is not None
        return _reasons(self.transport.connect(self.export, links, engines))

    def send(self, links: Mapping[int, EngineLink], engines: Sequence[int], order: Order) -> Sent:
        """Send one pass over the weights to `engines`, which have been met."""
        assert self.transport is not None
        if order.sleeping:
            self.residence.leave(Held.WEIGHTS)
        with self.residence.visited():
            sent = update_engines(
                self.transport, self.world, self.export, order, links, engines, self.make_room
            )
        return Sent(_reasons(sent.failures), sent.num_bytes, sent.needed_bytes)

    def _build_critic(self, updates: int) -> Critic | None:
        """The value model, which starts from the policy's checkpoint; None where advantages need none."""
        if self.config.algorithm.advantages != "critic":
            return None
        assert self.config.model.hf_checkpoint is not None
        shape = read_hf_config(self.config.model.hf_checkpoint)
        chunks = build_value_model(
            shape, self.config, device=self.world.device_type, libraries=self.libraries
        )
        load_hf(chunks, shape, self.config.model.hf_checkpoint, head=False)
        return Critic(chunks, self.config, self.world, updates)


def _reasons(failures: Mapping[int, Exception]) -> dict[int, str]:
    """Return the failures as text: an exception of a library may not survive the way to another process."""
    return {engine: str(error) for engine, error in failures.items()}
