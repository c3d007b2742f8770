"""Tokenizers behind one small protocol: Hugging Face directories and SentencePiece `.model` files.

All other modules see token ids. Pieces of a prompt are encoded one by one and joined as ids, so `encode` must
add nothing of its own: no special tokens, no leading space.
"""

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron_ibpo.basics.large_imports import import_transformers
from megatron_ibpo.basics.text import shown
from megatron_ibpo.basics.user_files import (
    JSON_BYTES,
    UserFileError,
    check_user_file,
    read_json_object,
    read_user_file,
)
from megatron_ibpo.data.template_process import TemplateError, TemplateProcess

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Files of a Hugging Face directory that `load_tokenizer` may read."""

MOST_IDS = 2**24
"""Limit on ids: a tokenizer's tables are as long as its largest id. Published vocabularies have a fiftieth of
this."""

TEMPLATE_DAY = datetime(2024, 7, 26)
"""Today, for chat templates: prompts depend on no clock. Llama 3's template takes this day where it knows of
none."""

Message = dict[str, str]
"""One chat turn: {"role": ..., "content": ...}."""


class DataError(ValueError):
    """Prompts or a tokenizer that cannot be used; the text says what, where and what to do."""


class Tokenizer(Protocol):
    """Text to token ids and back."""

    eos_id: int
    pad_id: int
    unk_id: int | None
    """Id that stands for unknown text; None if everything can be encoded."""
    vocab_size: int
    """Largest id, and one; the model's embedding may have more rows."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text` in the middle of a prompt: no special tokens are added."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of `text` at the start of a prompt: with the beginning-of-sequence id if the
        tokenizer adds one."""
        ...

    def encode_rendered(self, text: str) -> list[int]:
        """Return the ids of `text` at the start of a prompt from the chat template, which has the
        beginning-of-sequence token already."""
        ...

    def decode(self, ids: npt.ArrayLike) -> str:
        """Return the text of `ids` (an array or a sequence) without special tokens such as
        end-of-sequence."""
        ...

    def decode_all(self, ids: npt.ArrayLike) -> str:
        """Return the text of `ids` with special tokens, for display."""
        ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        settings: Mapping[str, Any] | None = None,
        *,
        generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return `messages` as one text in the tokenizer's chat format.

        Args:
            settings: further arguments of the template (--apply-chat-template-kwargs).
            generation_prompt: end with the beginning of the assistant's next turn.
            tools: shown to the assistant, each as {"name", "description", "parameters"}.

        Raises:
            DataError: the tokenizer has no chat template, or the template refuses the messages.
        """
        ...


def has_unknown(tokenizer: Tokenizer, ids: Sequence[int] | npt.NDArray[np.int32]) -> bool:
    """Return whether some of `ids` stand for what the tokenizer could not express."""
    return tokenizer.unk_id is not None and tokenizer.unk_id in ids


def id_of(text: str, tokenizer: Tokenizer) -> int | None:
    """Return the id that alone stands for `text`; None if there is none."""
    try:
        ids = tokenizer.encode(text)
    except DataError:  # a small vocabulary, without an id for what it does not know
        return None
    return ids[0] if len(ids) == 1 and ids[0] != tokenizer.unk_id else None


def decoder_with(mark: str, tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    """Return the decoder that shows `mark`, which may be a special token; it shows other special tokens only
    if the mark is one."""
    token = id_of(mark, tokenizer)
    return tokenizer.decode_all if token is not None and not tokenizer.decode([token]) else tokenizer.decode


def load_tokenizer(path: str | Path, *, embedding_rows: int | None = None) -> Tokenizer:
    """Load from local files: a Hugging Face directory, a SentencePiece `.model` file, or a directory with a
    `tokenizer.model` and no `tokenizer.json`.

    Args:
        embedding_rows: vocab_size of the model that reads the ids; None: not checked.

    Raises:
        DataError: no tokenizer there, unreadable files, no end-of-sequence token, or ids that the model does
            not have.
    """
    tokenizer = _load(Path(path))
    if embedding_rows is not None and tokenizer.vocab_size > embedding_rows:
        raise DataError(
            f"tokenizer {path}: its ids go up to {tokenizer.vocab_size - 1}, and the model's vocab_size in "
            f"config.json is {embedding_rows}: it has no embedding for the ids from {embedding_rows}; use "
            "the model's own tokenizer, or resize the model's embedding"
        )
    return tokenizer


def has_tokenizer(hf_dir: Path) -> bool:
    """Return whether the directory holds files of a tokenizer."""
    return any((hf_dir / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def _load(path: Path) -> Tokenizer:
    if not path.exists():
        raise DataError(f"tokenizer {path}: no such file or directory")
    if not path.is_dir() and path.suffix != ".model":
        raise DataError(f"tokenizer {path}: expected a Hugging Face directory or a SentencePiece .model file")
    model = path / "tokenizer.model" if path.is_dir() else path
    if model.exists() and not (path / "tokenizer.json").exists():
        return SentencePieceTokenizer(model)
    files = _checked_files(path)
    try:
        tokenizer = _tokenizer_class(files).from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise DataError(
            f"tokenizer {path}: cannot be loaded ({type(error).__name__}: {error}); the directory needs "
            "tokenizer.json and tokenizer_config.json, or a SentencePiece tokenizer.model"
        ) from error
    return HuggingFaceTokenizer(tokenizer, str(path))


def _checked_files(path: Path) -> dict[str, dict[str, Any]]:
    """Return the content of the JSON files, by name. Refuse files that the library would read without end, or
    that would give a table as long as the largest id."""
    present = [path / name for name in TOKENIZER_FILES if os.path.lexists(path / name)]
    for file in present:
        try:
            check_user_file(file, JSON_BYTES)
        except (OSError, UserFileError) as error:
            raise DataError(f"tokenizer {file}: {error}") from None
    contents = {file.name: read_json_object(file, DataError) for file in present if file.suffix == ".json"}
    for name, content in contents.items():
        _check_ids(path / name, content)
    return contents


def _check_ids(file: Path, content: dict[str, Any]) -> None:
    for ids in _tables_of_ids(file.name, content):
        for token, number in ids.items():
            if type(number) is not int or not 0 <= number < MOST_IDS:
                raise DataError(
                    f"{file}: {shown(token)} has the id {shown(number)}; it must be a whole number from 0 to "
                    f"{MOST_IDS - 1}"
                )


def _tables_of_ids(name: str, content: dict[str, Any]) -> Iterator[dict[Any, Any]]:
    """Yield the tables token → id in a tokenizer's files."""
    if name in ("vocab.json", "added_tokens.json"):
        yield content
    if name == "tokenizer.json":
        model, added = content.get("model"), content.get("added_tokens")
        if isinstance(model, dict) and isinstance(vocabulary := model.get("vocab"), dict):
            yield vocabulary
        if isinstance(added, list):
            yield {str(token.get("content")): token.get("id") for token in added if isinstance(token, dict)}
    decoder = content.get("added_tokens_decoder")
    if name == "tokenizer_config.json" and isinstance(decoder, dict):
        yield {key: int(key) if key.isdecimal() and len(key) < 20 else key for key in decoder}


def _tokenizer_class(files: dict[str, dict[str, Any]]) -> Any:
    """Return AutoTokenizer, or the class it would choose for a tokenizer that is complete in its
    tokenizer.json. AutoTokenizer imports torch and every model's configuration to find that out, which takes
    seconds."""
    chosen = files.get("tokenizer_config.json", {}).get("tokenizer_class")
    if "tokenizer.json" in files and chosen in ("TokenizersBackend", "PreTrainedTokenizerFast"):
        import_transformers()
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


@dataclass
class TokenTexts:
    """A function from ids to the text of each; every id is decoded once."""

    tokenizer: Tokenizer
    _text_of: dict[int, str] = field(default_factory=dict)

    def __call__(self, ids: npt.NDArray[np.int32]) -> list[str]:
        tokens = ids.tolist()
        for token in set(tokens) - self._text_of.keys():
            self._text_of[token] = self.tokenizer.decode([token])
        return [self._text_of[token] for token in tokens]


class HuggingFaceTokenizer:
    """A `transformers` tokenizer behind the `Tokenizer` protocol."""

    def __init__(self, tokenizer: Any, name: str = "tokenizer"):
        if tokenizer.eos_token_id is None:
            raise DataError(
                f"{name}: no end-of-sequence token; set eos_token in tokenizer_config.json, "
                "without it no response can end"
            )
        self._tokenizer = tokenizer
        self._name = name
        self.library: Any = tokenizer
        """The tokenizer of `transformers`, for libraries that ask for one."""
        self.eos_id: int = tokenizer.eos_token_id
        self.pad_id: int = self.eos_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.unk_id: int | None = tokenizer.unk_token_id
        self.vocab_size = 1 + max(tokenizer.get_vocab().values(), default=-1)
        bos_id = tokenizer.bos_token_id
        adds_bos = bos_id is not None and tokenizer("")["input_ids"][:1] == [bos_id]
        self._prefix: list[int] = [bos_id] if adds_bos else []
        self._spaceless = without_space_before(tokenizer)
        self._template = TemplateProcess(self._rendered)

    def encode(self, text: str) -> list[int]:
        return self._encoded(text, self._in_the_middle)

    def encode_prompt(self, text: str) -> list[int]:
        return self._prefix + self.encode_rendered(text)

    def encode_rendered(self, text: str) -> list[int]:
        return self._encoded(text, self._at_the_start)

    def _encoded(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        try:
            return encode(text)
        except Exception as error:  # a vocabulary without an unknown token raises for missing text
            raise DataError(
                f"{self._name}: cannot encode {shown(text)}: {error}; the vocabulary has "
                f"{self.vocab_size} tokens: is it this model's tokenizer?"
            ) from error

    def _at_the_start(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _in_the_middle(self, text: str) -> list[int]:
        """Return the ids without the space that the tokenizer puts before a text. Behind an added token, such
        as a special one, the space is the tokenizer's, wherever the text begins."""
        if self._spaceless is None:
            return self._at_the_start(text)
        added, backend = self._tokenizer.added_tokens_decoder, self._tokenizer.backend_tokenizer
        encoded = backend.encode(text, add_special_tokens=False)
        starts = (
            start for token, (start, _) in zip(encoded.ids, encoded.offsets, strict=True) if token in added
        )
        cut = next(starts, len(text))
        ids: list[int] = self._spaceless.encode(text[:cut], add_special_tokens=False).ids
        return ids + self._at_the_start(text[cut:]) if text[cut:] else ids

    def decode(self, ids: npt.ArrayLike) -> str:
        return self._tokenizer.decode(
            _plain(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def decode_all(self, ids: npt.ArrayLike) -> str:
        return self._tokenizer.decode(_plain(ids), clean_up_tokenization_spaces=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        settings: Mapping[str, Any] | None = None,
        *,
        generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        if not self._tokenizer.chat_template:
            raise DataError(
                f"{self._name}: no chat template; use a checkpoint that has one, "
                "or drop --apply-chat-template"
            )
        tool_schemas = [{"type": "function", "function": dict(tool)} for tool in tools] or None
        try:
            return self._template.render(list(messages), tool_schemas, generation_prompt, settings or {})
        except TemplateError as error:
            raise DataError(f"{self._name}: its chat template refuses the messages: {error}") from None

    def _rendered(
        self,
        messages: list[Mapping[str, Any]],
        tools: list[dict[str, Any]] | None,
        generation_prompt: bool,
        settings: Mapping[str, Any],
    ) -> str:
        random.seed(0)  # a template may draw
        return self._tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **{"strftime_now": TEMPLATE_DAY.strftime, **settings},
        )


def without_space_before(tokenizer: Any) -> Any:
    """Return a copy of a fast tokenizer that puts no space before a text; None if it never does."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    parts = {name: getattr(backend, name) for name in ("normalizer", "pre_tokenizer")}
    stored = {name: part and json.loads(part.__getstate__()) for name, part in parts.items()}
    plain = {name: _spaceless(part) for name, part in stored.items()}
    if plain == stored:
        return None
    return type(backend).from_str(json.dumps(json.loads(backend.to_str()) | plain))


def _spaceless(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a normalizer or pre-tokenizer, as tokenizer.json has it, without its space before a text."""
    if part is None or part["type"] == "Prepend":
        return None
    if part["type"] == "Sequence":
        name = "normalizers" if "normalizers" in part else "pretokenizers"
        inner = [plain for step in part[name] if (plain := _spaceless(step)) is not None]
        return {**part, name: inner}
    changes = {"prepend_scheme": "never", "add_prefix_space": False}
    return part | {name: value for name, value in changes.items() if name in part}


class SentencePieceTokenizer:
    """A SentencePiece model behind the `Tokenizer` protocol.

    SentencePiece puts a space before every text and may squeeze spaces; that is right at the start of a
    prompt and wrong in its middle, so the middle is encoded by a copy of the model with both turned off.
    """

    def __init__(self, path: Path):
        from sentencepiece import SentencePieceProcessor
        from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

        try:
            model = ModelProto.FromString(read_user_file(path, JSON_BYTES))
            self._start = SentencePieceProcessor(model_proto=model.SerializeToString())
        except Exception as error:
            raise DataError(f"tokenizer {path}: not a SentencePiece model ({error})") from error
        model.normalizer_spec.add_dummy_prefix = False
        model.normalizer_spec.remove_extra_whitespaces = False
        self._middle = SentencePieceProcessor(model_proto=model.SerializeToString())
        self._name = str(path)
        self.eos_id: int = self._start.eos_id()
        if self.eos_id < 0:
            raise DataError(f"tokenizer {path}: no end-of-sequence piece; without it no response can end")
        self.pad_id: int = self._start.pad_id() if self._start.pad_id() >= 0 else self.eos_id
        self.unk_id: int | None = self._start.unk_id()
        self.vocab_size: int = self._start.vocab_size()
        self._prefix: list[int] = [self._start.bos_id()] if self._start.bos_id() >= 0 else []

    def encode(self, text: str) -> list[int]:
        return list(self._middle.encode(text))

    def encode_prompt(self, text: str) -> list[int]:
        return self._prefix + self.encode_rendered(text)

    def encode_rendered(self, text: str) -> list[int]:
        return list(self._start.encode(text))

    def decode(self, ids: npt.ArrayLike) -> str:
        return self._start.decode(_plain(ids))

    def decode_all(self, ids: npt.ArrayLike) -> str:
        return "".join(self._start.id_to_piece(_plain(ids))).replace("▁", " ")

    def render_chat(self, *_: Any, **__: Any) -> str:
        raise DataError(
            f"tokenizer {self._name}: a SentencePiece model has no chat template; "
            "drop --apply-chat-template and write the prompts out"
        )


def _plain(ids: npt.ArrayLike) -> list[int]:
    """Return the ids as a list of Python integers, which the libraries take."""
    return np.asarray(ids, np.int64).tolist()


def read_eos_token_ids(hf_dir: Path) -> tuple[int, ...]:
    """Return the end-of-sequence ids: those of generation_config.json if it names any, otherwise those of
    config.json. Raises ValueError if neither file names one."""
    for name in ("generation_config.json", "config.json"):
        if not (hf_dir / name).exists():
            continue
        config = read_json_object(hf_dir / name, DataError)
        text = config.get("text_config")  # a wrapped text model has its own
        value = config.get("eos_token_id", text.get("eos_token_id") if isinstance(text, dict) else None)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(number) is int and 0 <= number < 2**31 for number in ids):
            raise ValueError(
                f"{hf_dir / name}: eos_token_id must be an id or a list of ids, is {shown(value)}"
            )
        if ids:
            return tuple(ids)
    raise ValueError(
        f"{hf_dir}: neither generation_config.json nor config.json names eos_token_id, so sampling would "
        "never stop; add it to config.json"
    )
