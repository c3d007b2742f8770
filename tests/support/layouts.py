from megatron_ibpo.config import ParallelConfig


def layout(
    tp=1, pp=1, ep=1, etp=1, cp=1, *, distributed_optimizer=False, vocabulary=1, first=None, last=None, **more
):
    """`first`, `last`: layers of the outer pipeline stages; `vocabulary`: what its size is divisible by."""
    return ParallelConfig(
        context_parallel_size=cp, decoder_first_pipeline_num_layers=first,
        decoder_last_pipeline_num_layers=last, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
        make_vocab_size_divisible_by=vocabulary, pipeline_model_parallel_size=pp,
        tensor_model_parallel_size=tp, use_distributed_optimizer=distributed_optimizer, **more,
    )  # fmt: skip
