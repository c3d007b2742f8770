"""The multi-token prediction layer as a separate Megatron model beside the policy's.

Megatron would build it into GPTModel. As a separate model, its gradients, optimizer and data parallelism
cannot touch the policy's: the policy is the same bit for bit whether the layer is trained or not.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megatron_ibpo.config import Config
from megatron_ibpo.models import ModelShape
from megatron_ibpo.models.backends import Backends
from megatron_ibpo.models.families import family_module
from megatron_ibpo.models.spec import Backend, make_backend
from megatron_ibpo.policy.model import current_device, fused_parts, transformer_config

Embedding = Callable[..., Tensor]
"""GPTModel's embedding: input_ids [1, N], position_ids [1, N] → [N, 1, H], with sequence parallelism [N / TP,
1, H]."""


class MtpModel(MegatronModule):
    """One multi-token prediction layer with one attention layer (DeepSeek-AI, "DeepSeek-V3 Technical Report",
    2024, section 2.2). Parameters and checkpoint use the same names as in a GPTModel."""

    def __init__(self, config: Any, layer: ModuleSpec):
        super().__init__(config=config)
        self.mtp = MultiTokenPredictionBlock(
            config,
            MultiTokenPredictionBlockSubmodules(layer_specs=[layer]),
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )

    def forward(
        self,
        hidden_states: Tensor,
        next_ids: Tensor,
        position_ids: Tensor,
        embedding: Embedding,
        rotary: Tensor,
        packed: PackedSeqParams,
    ) -> Tensor:
        """Return the hidden states from which the policy's head computes logits for the tokens after
        `next_ids`; shaped like `hidden_states`.

        Args:
            hidden_states: [N, 1, H] the policy's, after its final norm, one row per token; [N / TP, 1, H]
                with sequence parallelism.
            next_ids: [1, N] the token after each.
            position_ids: [1, N].
            rotary: as GPTModel's `rotary_pos_emb` gives it.
            packed: places of the sequences.
        """
        # the only path through it that rolls no tokens; they are known here
        return self.mtp.layers[0].forward_single_position(
            hidden_states, next_ids, position_ids, embedding, rotary_pos_emb=rotary, packed_seq_params=packed
        )


def build_mtp(
    shape: ModelShape, config: Config, *, device: Literal["cpu", "cuda", "meta"], libraries: Backends
) -> MtpModel:
    """Build this rank's part of the layer that --mtp-num-layers asks for, in the dtype of the policy.

    Weights are not initialised: `weights.formats.load.load_mtp` fills them. The layer has no loss that
    balances its experts, since it only has to predict what the policy samples. Its activations are never
    recomputed as a whole, not even under --recompute-granularity full: it is one layer.
    """
    core = transformer_config(
        shape,
        config,
        use_te=libraries.transformer_engine,
        fused=fused_parts(libraries, shape, config, device),
    )
    core.use_cpu_initialization = device == "cpu"
    core.init_model_with_meta_device = device == "meta"
    core.moe_permute_fusion &= device == "cuda"
    core.moe_router_load_balancing_type, core.moe_aux_loss_coeff = "none", 0.0
    core.mtp_num_layers = config.model.mtp_num_layers
    with torch.device(device), current_device(device):
        model = MtpModel(core, _spec(shape, make_backend(libraries)))
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False  # as `build_model`
    return model.to(device)


def _spec(shape: ModelShape, backend: Backend) -> ModuleSpec:
    return ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=backend.norm,
            hnorm=backend.norm,
            eh_proj=backend.column_linear,
            mtp_model_layer=family_module(shape.family).mtp_layer_spec(shape, backend),
            layer_norm=backend.norm,
        ),
    )
