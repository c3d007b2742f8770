from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_ibpo.data.tokenizer import HuggingFaceTokenizer


def bytes_of(merges=()):
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    bytes_only = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, list(merges)))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    return bytes_only


def byte_level(template=None, merges=()):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_of(merges), eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = template
    return HuggingFaceTokenizer(tokenizer)
