"""No key is shown: not by a server or a library that repeats it in any spelling, and not in part."""

import asyncio
import base64
import html
import json
import logging
import socket
import threading
import time
import traceback
import urllib.parse
import warnings
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ibpo.basics import entry_point
from megatron_ibpo.basics.records import Prompt, token_ids
from megatron_ibpo.basics.text import error_text, keep_keys_from_logs, without_keys
from megatron_ibpo.config import ConfigError, DataConfig
from megatron_ibpo.rewards import Score, Verifier, check_servers
from megatron_ibpo.rewards.workers import WorkerPool

QUESTION = Prompt(0, token_ids([]), 0, "42", "task", "6 * 7?")
KEY = "sk-+/=k\"ey&'\\1234567890"
PARTS = [KEY[start : start + 8] for start in range(len(KEY) - 7)]
ANSWERS = {
    "a 204 with a body": b"HTTP/1.1 204 No Content\r\nContent-Length: 40\r\n\r\n",
    "a 304 with a body": b"HTTP/1.1 304 Not Modified\r\n\r\n",
    "a 100 with a body": b"HTTP/1.1 100 Continue\r\n\r\n",
    "no status line": b"",
    "no status code": b"HTTP/1.1 ",
    "a header": b"HTTP/1.1 200 OK\r\nX: y\x00",
    "a length": b"HTTP/1.1 200 OK\r\nContent-Length: ",
    "a chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    "content": b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b"x" * 90,
    "a status": b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\n\r\n",
}
"""What a server sends before the headers of the request, as they came."""


@contextmanager
def echoing(before):
    """A server that sends this, and then what it was sent."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                received = connection.recv(65536)
                key = next(line for line in received.split(b"\r\n") if line.startswith(b"Authorization"))
                connection.sendall(before + key * 3 + b"\r\n\r\n")
                time.sleep(0.02)

    threading.Thread(target=serve, daemon=True).start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/score"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("IBPO_RM_API_KEY", KEY)
    monkeypatch.setattr("megatron_ibpo.rewards.reward_server._FIRST_WAIT", 0.02)


def assert_hidden(text, case):
    assert not [part for part in PARTS if part in text], f"{case}: {text}"


@pytest.fixture(scope="module")
def pool():
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("IBPO_RM_API_KEY", KEY)
        with WorkerPool(["megatron_ibpo.rewards.http_wires:server_score"], size=1, timeout=20) as opened:
            yield opened


@pytest.mark.parametrize("case", ANSWERS)
def test_a_server_that_repeats_the_key_has_it_shown_nowhere(pool, case, caplog):
    data = DataConfig(rm_type="http_score", rm_timeout=0.2)
    caplog.set_level(logging.DEBUG)
    with echoing(ANSWERS[case]) as url:
        data.rm_url = url
        with pytest.raises(ConfigError) as refused:
            check_servers(data)
        verifier = Verifier(pool, data)
        (lost,) = verifier.score([(QUESTION, "42")])
        verifier.close_servers()
    assert lost.reward is None
    trace = "".join(traceback.format_exception(refused.value))
    assert_hidden("\n".join([trace, repr(refused.value), repr(lost), caplog.text]), case)
    assert "\n" not in str(refused.value)
    assert "[key]" in str(refused.value)


SPELLINGS = {
    "plain": str,
    "cut": lambda key: key[2:-3],
    "capitals": lambda key: "".join(c.upper() if c.upper().lower() == c else c for c in key),
    "JSON": json.dumps,
    "JSON in JSON": lambda key: json.dumps(json.dumps({"key": key})),
    "JSON of PHP": lambda key: json.dumps(key).replace("/", "\\/"),
    "repr": repr,
    "repr of bytes": lambda key: repr(f"Bearer {key}".encode()),
    "HTML": html.escape,
    "URL": urllib.parse.quote,
    "a parameter": lambda key: urllib.parse.urlencode({"key": key}),
    "small escapes": lambda key: urllib.parse.quote(key, safe="").lower(),
    "base64": lambda key: base64.b64encode(key.encode()).decode(),
    "base64 of credentials": lambda key: base64.b64encode(f"u:{key}".encode()).decode(),
    "base64 in a URL": lambda key: base64.urlsafe_b64encode(f"user:{key}".encode()).decode(),
    "hexadecimal": lambda key: key.encode().hex(),
    "another encoding": lambda key: key.encode().decode("latin-1"),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@given(key=st.text(st.characters(min_codepoint=33, max_codepoint=0x17F), min_size=13, max_size=40))
@settings(max_examples=30, deadline=None)
def test_a_key_is_recognised_in_any_spelling(spelling, key):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", key)
        written = SPELLINGS[spelling](key)
        found = without_keys(f"before {written} after")
        assert "[key]" in found, written
        # base64 has letters at both ends that the neighbours of the key settle
        assert sum(map(len, found.split("[key]"))) <= len("before  after") + 25, (written, found)
        assert without_keys("before  after") == "before  after"


def test_short_keys_are_hidden_and_words_containing_them_stay(monkeypatch):
    monkeypatch.setenv("IBPO_RM_API_KEY", "EMPTY")
    assert without_keys("Bearer EMPTY, the queue is empty") == "Bearer [key], the queue is empty"
    monkeypatch.setenv("IBPO_RM_API_KEY", "token")
    said = "tokenizer.json, tokens and _token_: key=token, " + repr("\ntoken")
    assert without_keys(said) == "tokenizer.json, tokens and _[key]_: key=[key], '\\n[key]'"
    monkeypatch.setenv("IBPO_RM_API_KEY", "tok3n")
    assert without_keys("%20tok3nizer") == "%20[key]izer", "with a number in it, it may be a real one"
    monkeypatch.setenv("IBPO_RM_API_KEY", " ")
    assert without_keys("Bearer EMPTY") == "Bearer EMPTY"


def test_long_texts_are_searched_in_time_linear_in_their_length():
    text = (KEY[:7] + "İ") * 200_000
    start = time.process_time()
    assert without_keys(text) == text
    assert time.process_time() - start < 2


def test_logs_tracebacks_and_a_commands_last_line_have_no_key(tmp_path, capsys, caplog):
    keep_keys_from_logs()
    try:
        try:
            raise KeyError(f"inner {KEY}")
        except KeyError as inner:
            raise RuntimeError(f"outer {KEY}") from inner
    except RuntimeError as error:
        logging.getLogger("aiohttp.client").exception("%s failed", KEY)
        assert_hidden(error_text(error) + error_text(ValueError("x" * 490 + KEY)), "error_text")
        assert_hidden(repr(Score(None, False, error_text(error))), "score")
    loop = asyncio.new_event_loop()
    loop.call_exception_handler({"message": "never retrieved", "exception": ValueError(KEY)})
    loop.close()
    assert caplog.text.count("[key]") >= 4
    assert_hidden(caplog.text, "logs")
    warned = warnings.formatwarning(ResourceWarning(f"Unclosed {KEY}"), ResourceWarning, "client.py", 1)
    assert warned == "client.py:1: ResourceWarning: Unclosed [key]\n"
    (tmp_path / "logs").mkdir()

    def fail():
        raise RuntimeError(f"of a library: {KEY}") from ValueError(KEY)

    entry_point.guarded(fail, logs=tmp_path / "logs")
    said = capsys.readouterr().err
    assert said.count("[key]") == 1
    assert_hidden(said + (tmp_path / "logs/driver.log").read_text(), "a command")


def test_an_invalid_key_is_refused_without_being_shown(monkeypatch):
    for key in ("sk-1234567890\nX-Other: 1", "sk-12345é67890", "sk-1234567890\udcff"):
        monkeypatch.setenv("IBPO_RM_API_KEY", key)
        with pytest.raises(ConfigError, match=r"^IBPO_RM_API_KEY: has characters") as refused:
            check_servers(DataConfig(rm_type="http_score", rm_url="http://127.0.0.1:9/score"))
        assert "sk-" not in "".join(traceback.format_exception(refused.value)).partition("ConfigError")[2], (
            key
        )
