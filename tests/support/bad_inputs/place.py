"""Valid inputs of every kind, made once; each bad input is one of them that was changed."""

import gzip
import json
import shutil

from support.paths import ROOT

TASK = "reasoning_gym://chain_sum?min_terms=2&max_terms=3&min_digits=1&max_digits=1&compact=1"
LETTERS = 260  # tokens of the models' vocabulary: bytes and what is special
RUN = (
    "--rollout-backend", "lean", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2",
    "--rollout-max-response-len", "4", "--operator-skill-prompts", "0", "--reward-workers", "1",
    "--rm-type", "reasoning_gym", "--max-tokens-per-gpu", "512",
)  # fmt: skip
"""Flags of a run that takes a second in one process."""
EVALUATED = (
    "--eval-num-prompts", "2", "--n-samples-per-eval-prompt", "1", "--eval-max-response-len", "4",
    "--rm-type", "math",
)  # fmt: skip
METADATA = {"level": [1, 2.5, {"deep": "text"}]}
ROWS = [{"prompt": f"{n}+2", "label": str(n + 2), "task": "sums", "metadata": METADATA} for n in range(4)]
BENCHMARKS = {
    "aime25": [{"problem": f"{n}+2", "answer": n + 2, "id": n} for n in range(3)],
    "math500": [{"problem": f"{n}+2", "answer": str(n + 2), "unique_id": str(n)} for n in range(3)],
    "gsm8k": [{"question": f"{n}+2", "answer": f"sum\n#### {n + 2}"} for n in range(3)],
    "humaneval": [
        {"task_id": f"h/{n}", "prompt": f"def f{n}():", "test": "def check(f): pass", "entry_point": f"f{n}"}
        for n in range(3)
    ],
    "mbpp": [{"task_id": 11 + n, "text": f"write f{n}", "test_list": [f"assert f{n}()"]} for n in range(3)],
    "livecodebench_v6": [
        {
            "question_id": str(n), "question_content": f"add {n}", "contest_date": "2025-03-01T00:00:00",
            "starter_code": "", "metadata": "{}", "public_test_cases": '[{"input": "1", "output": "2"}]',
            "private_test_cases": "[]",
        }
        for n in range(3)
    ],
}  # fmt: skip
STUDY = {
    "recipe": "examples/recipes/tiny_qwen3_study.yaml",
    "baseline": "gspo", "budget": 40000, "budget-unit": "tokens", "seeds": [0, 1], "threshold": 0.5,
    "processes": 1, "run-timeout": 100,
    "common": {"eval-num-prompts": 8, "hf-checkpoint": "examples/tiny_qwen3"},
    "methods": {"gspo": {"advantage-estimator": "gspo"}, "ibpo": {"advantage-estimator": "ibpo"}},
    "tasks": {"sums": {"settings": {"rm-type": "reasoning_gym"}, "kind": "sums", "skill": 0.5}},
    "tune": {
        "grid": {"lr": [1e-4, 3e-4]}, "seeds": [5], "budget": 1000, "own": {"ibpo": {"ibpo-lambda": [0.5]}},
    },
    "pilot-seeds": [6, 7],
    "confirm-seeds": [8],
}  # fmt: skip
SUMS = {
    "settings": {"policy": "a", "--seed": 0}, "settings_hash": "0" * 16, "measures": {"accuracy": 0.5},
    "intervals": {"accuracy": [0.1, 0.9]}, "notes": [],
    "problems": {"id": ["a", "b", "c"], "digest": ["1", "2", "3"], "accuracy": [0.0, 1.0, 0.5]},
}  # fmt: skip
RESULTS = {"status": "finished", "policy": "a", "sets": {"sums": SUMS}}
SMALL = {"rollout-max-response-len": 4, "rollout-batch-size": 8, "max-tokens-per-gpu": 512}
"""Recipe keys without which no plan fits the models of this module."""


class Place:
    def __init__(self, directory):
        self.directory, self.gguf, self.recipe = directory, directory / "model.gguf", directory / "small.yaml"
        names = ("hf", "next", "stored", "run", "replayed", "data", "evaluation")
        self.hf, self.next, self.stored, self.run, self.replayed, self.data, self.results = (
            directory / name for name in names
        )

    def make(self):
        """Write all of them but the runs. Takes torch, so that it is done in a child."""
        import torch

        from megatron_ibpo.basics.distributed import World
        from megatron_ibpo.config import ParallelConfig
        from megatron_ibpo.weights.formats.convert import hf_to_megatron
        from support.tiny_gguf import tiny_gguf
        from support.tiny_models import make_qwen3

        make_qwen3(self.hf, 1, vocabulary=LETTERS)
        _save_tokenizer(self.hf)
        shutil.copytree(ROOT / "examples/tiny_qwen3_next", self.next)
        hf_to_megatron(self.hf, self.stored, ParallelConfig(), World(0, 1, torch.device("cpu"), None))
        self._make_data()
        tiny_gguf(self.gguf)
        self.recipe.write_text(json.dumps(SMALL))
        self.results.mkdir()
        (self.results / "results.json").write_text(json.dumps(RESULTS))

    @property
    def runs(self):
        """Two steps with a journal and recordings, no checkpoint; one step with a checkpoint."""
        return (
            [*self.flags(self.run), "--num-rollout", "2", "--save-debug-rollout-data"],
            [*self.flags(self.replayed)[:-1], "--num-rollout", "1"],
        )

    def flags(self, run_dir):
        named = {"--hf-checkpoint": self.hf, "--prompt-data": TASK, "--run-dir": run_dir}
        words = [word for flag, value in named.items() for word in (flag, str(value))]
        return [*words, *RUN, "--eval-num-prompts", "0", "--no-save"]

    def valid(self):
        """A command for each kind of valid input, which must take it: else nothing bad about it is tested."""
        hf, out = ["--hf-checkpoint", self.hf], self.directory / "out"
        study = self.directory / "study.yaml"
        study.write_text(json.dumps(STUDY))
        benchmarks = [f"{name}={name}://{self.data}/{name}.json" for name in BENCHMARKS]
        evaluated = ["--num-rollout", "1", *EVALUATED, "--eval-prompt-data", *benchmarks]
        files = ["rows.jsonl", "rows.jsonl.gz", "rows.parquet", "saved"]
        return [
            ["plan", *hf, "--config", self.recipe],
            ["search", *hf, "--gpus", "8", "--hardware", "h100", "--config", self.recipe],
            *(["data", *hf, "--prompt-data", self.data / name] for name in files),
            *(["inspect", checkpoint] for checkpoint in (self.hf, self.next, self.stored)),
            ["convert to-hf", "--load", self.stored, "--save", out / "hf"],
            ["convert-gguf", "--gguf", self.gguf, "--save", out / "gguf"],
            ["train", *self.flags(self.run), "--load", self.run, "--num-rollout", "2"],
            ["page", self.run, "--save", self.directory / "page.html"],
            ["train", *self.flags(out / "run"), *evaluated],
            ["evaluate", "compare", self.results, self.results],
            ["compare", study, "--save", out / "study", "--runs-at-most", "0"],
        ]  # fmt: skip

    def _make_data(self):
        import pyarrow as pa
        from pyarrow import parquet

        self.data.mkdir()
        lines = _lines(ROWS).encode()
        (self.data / "rows.jsonl").write_bytes(lines)
        (self.data / "rows.jsonl.gz").write_bytes(gzip.compress(lines))
        table = pa.Table.from_pylist([{"prompt": row["prompt"], "label": row["label"]} for row in ROWS])
        parquet.write_table(table, self.data / "rows.parquet")
        saved, arrow = self.data / "saved", "data-00000-of-00001.arrow"
        saved.mkdir()
        with pa.ipc.new_stream(saved / arrow, table.schema) as stream:
            stream.write_table(table)
        (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": arrow}]}))
        for name, rows in BENCHMARKS.items():
            (self.data / f"{name}.jsonl").write_text(_lines(rows))
            (self.data / f"{name}.json").write_text(json.dumps(rows))


def _lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def _save_tokenizer(directory):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    names = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>",
        chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}",
    ).save_pretrained(directory)  # fmt: skip
