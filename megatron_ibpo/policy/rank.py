"""One trainer process: a rank of Megatron's world, with the methods that the driver calls. All ranks get the
same calls at the same time, each with its own share of the data; results are small, or of that share."""

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
from megatron_ibpo.policy.adapters import merged_values, offered_adapters, shift_factors
from megatron_ibpo.policy.checkpoint import load_checkpoint
from megatron_ibpo.policy.critic import Critic
from megatron_ibpo.policy.gradient_meter import compare_with_gspo
from megatron_ibpo.policy.group import About, SendReport
from megatron_ibpo.policy.model import build_model, build_value_model
from megatron_ibpo.policy.mtp import build_mtp
from megatron_ibpo.policy.planning import RankForward, RankMeasure, RankUpdate
from megatron_ibpo.policy.residence import OnDevice, Residence, load_reference
from megatron_ibpo.policy.saving import SaveOrder, Saver
from megatron_ibpo.policy.trainer import Trainer
from megatron_ibpo.weights.formats.hf_models import load_hf, load_mtp, save_hf
from megatron_ibpo.weights.formats.run_state import Keep
from megatron_ibpo.weights.layout.export import HFExport
from megatron_ibpo.weights.transfer.link import EngineLink, UpdateOrder
from megatron_ibpo.weights.transfer.update import Transport, open_transport, update_engines


class TrainerRank:
    """This rank's part of the policy (and of the critic), and its connection to the engines."""

    def __init__(self, config: Config, checkpoint: Path | None) -> None:
        """Join the other ranks, build the model and load the weights, or the checkpoint to resume from.
        Collective, like all methods here. Raises ValueError or OSError for a layout, checkpoint or model that
        cannot be used, or a library that the machine lacks."""
        self.config = config
        self.shape = shape = read_hf_config(config.model.hf_dir)
        self.libraries = find_backends(
            shape,
            on_gpu=torch.cuda.is_available(),
            allow_local=config.model.allow_local_modules,
            bf16=config.model.bf16,
        )
        self.world: World = start_world(config.parallel.distributed_timeout_minutes)
        if config.optimizer.optimizer_cpu_offload and self.world.device.type == "cuda":
            # the optimizer then steps on CPUs; not run on GPUs
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            torch.set_num_threads(max(torch.get_num_threads(), len(os.sched_getaffinity(0)) // ranks))
        parallel.initialize(config.parallel, self.world, config.run.seed)
        chunks = build_model(shape, config, device=self.world.device_type, libraries=self.libraries)
        load_hf(chunks, shape, config.model.hf_dir)
        mtp = None
        if config.model.mtp_num_layers:
            mtp = build_mtp(shape, config, device=self.world.device_type, libraries=self.libraries)
            load_mtp(mtp, chunks, shape, config.model.hf_dir)
        values = merged_values(chunks)
        self.export = HFExport(chunks, shape, values=values)
        """Export of what engines take."""
        self.whole_export = HFExport(chunks, shape, mtp=mtp, values=values)
        """Export of everything that files hold."""
        adapters = offered_adapters(chunks, shape, config.model)
        updates = config.run.num_rollout * config.loss.updates_per_rollout
        reference = None
        if config.loss.kl_coef > 0:
            reference = load_reference(chunks, shape, config.model.ref_load)
        self.trainer = Trainer(chunks, shape.vocab_size, config, self.world, updates, reference, mtp)
        self.critic = self._build_critic(updates)
        self.saver = Saver(self.world, adapters)
        self.notes: tuple[str, ...] = ()
        if checkpoint is not None:
            self.notes = load_checkpoint(self.trainer, checkpoint, self.critic)
        trained = [model for model in (self.trainer, self.trainer.mtp, self.critic) if model is not None]
        offload = config.rollout.colocate and config.rollout.offload_train
        self.residence = Residence(trained, self.world, offload=offload)
        self.transport: Transport | None = None

    def about(self) -> About:
        parameters = sum(math.prod(meta.shape) for meta in self.export.metadata())
        layers = served_by(self.shape, self.libraries, bf16=bool(self.config.model.bf16))
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        return About(parameters, str(self.trainer.loss_backend), layers, device, self.notes)

    def update(self, work: RankUpdate) -> dict[str, float]:
        """Take the policy's optimizer steps of one rollout."""
        self.residence.bring_for_steps()
        return self.trainer.update(work)

    def update_critic(self, work: RankUpdate) -> dict[str, float]:
        """Take the critic's optimizer steps of one rollout."""
        assert self.critic is not None
        self.residence.bring_for_steps()
        return self.critic.update(work)

    def logprobs(self, work: RankForward) -> list[tuple[int, Floats]]:
        """Return (index of the sequence, log-probs of its response tokens) on ranks that report."""
        self.residence.bring(OnDevice.WEIGHTS)
        return self.trainer.logprobs(work)

    def values(self, work: RankForward) -> list[tuple[int, Floats]]:
        """Return (index of the sequence, the critic's values before each response token)."""
        assert self.critic is not None
        self.residence.bring(OnDevice.WEIGHTS)
        return self.critic.values(work)

    def measure_gradient(self, work: RankMeasure) -> dict[str, float]:
        """Return the noise of the gradient over prompts, and of GSPO's gradient on the same responses."""
        self.residence.bring(OnDevice.EVERYTHING)
        return compare_with_gspo(self.trainer, work)

    def save(self, directory: Path, step: int, run_state: dict[str, Any], keep: Keep) -> None:
        """Begin a Megatron checkpoint under `directory` (`Saver`); `policy.group` drives its later stages."""
        self.residence.bring(OnDevice.EVERYTHING)
        self.saver.begin(self.trainer, SaveOrder(directory, step, run_state, keep), self.critic)

    def save_rests(self, wait: bool) -> bool:
        """Return whether this rank has nothing left to write; with `wait`, wait for that. Not collective."""
        return self.saver.rests(wait=wait)

    def seal_save(self) -> None:
        """Turn the ranks' parts into one checkpoint, and begin to give it its name."""
        self.saver.seal()

    def end_save(self) -> None:
        """Raise the error of giving the checkpoint its name, if there was one."""
        self.saver.end()

    def save_hf(self, directory: Path) -> None:
        """Write the policy in Hugging Face format."""
        with self.residence.visited():
            save_hf(self.whole_export, self.world, directory, self.config.model.hf_dir, self.saver.adapters)

    def load_weights(self, hf_dir: Path) -> None:
        """Take the weights of a checkpoint of the same model; the optimizer's state stays."""
        self.residence.bring(OnDevice.EVERYTHING)
        load_hf(self.trainer.chunks, self.shape, hf_dir)
        self.trainer.optimizer.reload_model_params()

    def shift_adapters(self, factor: str, amount: float) -> None:
        """Add a number to every element of the adapters' factors "A" or "B", the same on all ranks."""
        self.residence.bring(OnDevice.EVERYTHING)
        shift_factors(self.trainer.chunks, factor, amount)
        self.trainer.optimizer.reload_model_params()

    def make_room(self) -> None:
        """Leave the device to engines that share it; later calls bring back what they need."""
        self.residence.leave(OnDevice.NOTHING)

    def open_transport(self, path: str, drafts_with_mtp: bool = False) -> None:
        """Prepare to send weights by the transport class at this import path, before `connect`. Engines that
        draft (`drafts_with_mtp`) take the multi-token prediction layer too; others have no place for it."""
        rollout = self.config.rollout
        if drafts_with_mtp:
            self.export = self.whole_export
        self.transport = open_transport(
            path,
            self.world,
            workers_per_engine=rollout.rollout_num_gpus_per_engine,
            bucket_bytes=rollout.update_weight_buffer_size,
            timeout=rollout.update_weight_timeout,
        )

    def connect(self, links: Mapping[int, EngineLink], engines: Sequence[int]) -> dict[int, str]:
        """Connect to `engines`; this rank calls those in `links`. Return why engines failed."""
        assert self.transport is not None
        return _reasons(self.transport.connect(self.export, links, engines))

    def send(self, links: Mapping[int, EngineLink], engines: Sequence[int], order: UpdateOrder) -> SendReport:
        """Send one pass over the weights to `engines`, after `connect`."""
        assert self.transport is not None
        if order.sleeping:
            self.residence.leave(OnDevice.WEIGHTS)
        with self.residence.visited():
            sent = update_engines(
                self.transport, self.world, self.export, order, links, engines, self.make_room
            )
        return SendReport(_reasons(sent.failures), sent.num_bytes, sent.needed_bytes, sent.waits)

    def _build_critic(self, updates: int) -> Critic | None:
        """Build the value model, which starts from the policy's checkpoint; None if advantages need none."""
        if not self.config.algorithm.trains_critic:
            return None
        chunks = build_value_model(
            self.shape, self.config, device=self.world.device_type, libraries=self.libraries
        )
        load_hf(chunks, self.shape, self.config.model.hf_dir, head=False)
        return Critic(chunks, self.config, self.world, updates)


def _reasons(failures: Mapping[int, Exception]) -> dict[int, str]:
    """Return the failures as text: a library's exception may not survive pickling."""
    return {engine: str(error) for engine, error in failures.items()}
