"""Prompts, reward and tokenizer for random models of any vocabulary."""

import json
import random
import zlib

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def rows(split):
    draw = random.Random(split)
    for number in range(4096):
        yield {"prompt": f"{number} {draw.getrandbits(64):x}", "label": "-"}


def score(question, response, label, metadata):
    """Half of all responses are right, whatever they are."""
    return float(zlib.crc32(f"{question}|{response}".encode()) % 2)


def write_tokenizer(directory, size, eos):
    """Write the tokenizer of a model with `size` tokens: bytes, then words that only models write."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = letters + [f"w{number}" for number in range(len(letters), size)]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": vocabulary[eos]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
