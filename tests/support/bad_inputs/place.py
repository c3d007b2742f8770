"""Valid inputs of every kind, made once; each bad input is a copy of one of them that was changed."""

import gzip
import json
import shutil
from pathlib import Path

from support.paths import ROOT

TASK = "reasoning_gym://chain_sum?min_terms=2&max_terms=3&min_digits=1&max_digits=1&compact=1"
RUN = (
    "train --hf-checkpoint {valid}/hf --prompt-data {task} --run-dir {here}/trained --rollout-backend lean "
    "--rollout-batch-size 2 --n-samples-per-prompt 2 --rollout-max-response-len 4 --max-tokens-per-gpu 512 "
    "--operator-skill-prompts 0 --reward-workers 1 --rm-type reasoning_gym --eval-num-prompts 0 "
    "--num-rollout 1"
)
"""A run that takes a second in one process."""
TRAIN = f"{RUN} --no-save"
BENCHMARK = (
    f"{TRAIN} --rm-type math --eval-num-prompts 1 --n-samples-per-eval-prompt 1 --eval-max-response-len 4 "
    "--eval-prompt-data {stem}://{file}"
)
PLAN = "plan --rollout-max-response-len 4 --hf-checkpoint {valid}/hf"
SEARCH = "search --hf-checkpoint {valid}/hf --gpus 8 --hardware h100 --config {valid}/small.yaml"
SMALL = {"rollout-max-response-len": 4, "rollout-batch-size": 8, "max-tokens-per-gpu": 512}
"""Recipe keys without which no plan fits the model."""
METADATA = {"level": [1, 2.5, {"deep": "text"}]}
ROWS = [{"prompt": f"{n}+2", "label": str(n + 2), "task": "sums", "metadata": METADATA} for n in range(4)]
BENCHMARKS = {
    "aime25": {"problem": "1+2", "answer": 3, "id": 1},
    "gsm8k": {"question": "1+2", "answer": "sum\n#### 3"},
    "humaneval": {"task_id": "h/1", "prompt": "def f():", "test": "def check(f): pass", "entry_point": "f"},
    "mbpp": {"task_id": 11, "text": "write f", "test_list": ["assert f()"]},
    "livecodebench_v6": {
        "question_id": "1", "question_content": "add", "contest_date": "2025-03-01T00:00:00",
        "starter_code": "", "metadata": "{}", "public_test_cases": '[{"input": "1", "output": "2"}]',
        "private_test_cases": "[]",
    },
}  # fmt: skip
STUDY = {
    "recipe": str(ROOT / "examples/recipes/tiny_qwen3_study.yaml"),
    "baseline": "gspo", "budget": 40000, "budget-unit": "tokens", "seeds": [0, 1], "threshold": 0.5,
    "processes": 1, "run-timeout": 100,
    "common": {"eval-num-prompts": 8, "hf-checkpoint": str(ROOT / "examples/tiny_qwen3")},
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
RUNS = (
    f"{TRAIN} --run-dir {{valid}}/run --num-rollout 2 --save-debug-rollout-data",
    f"{RUN} --run-dir {{valid}}/saved",
)
"""Two steps with a journal and recordings, no checkpoint; one step with a checkpoint."""


def filled(template, valid, **values):
    """The words of a command, in which the present directory is {here}."""
    if (file := values.get("file")) is not None:
        values["stem"] = file.name.partition(".")[0]
        if file.parent.name == "saved_data":  # which is read as a whole
            values["file"] = file.parent
    return [word.format(valid=valid, here=Path.cwd(), task=TASK, **values) for word in template.split()]


def copied(valid, name):
    copy, source = Path.cwd() / name, valid / name
    shutil.copytree(source, copy) if source.is_dir() else shutil.copy(source, copy)
    return copy


def make(valid):
    """Write all but the runs. Takes torch, so that it is done in a child."""
    import pyarrow as pa
    from pyarrow import parquet
    from safetensors.torch import load_file

    from support.byte_tokenizers import byte_level
    from support.tiny_gguf import tiny_gguf
    from support.tiny_models import make_qwen3

    tokenizer = byte_level("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    make_qwen3(valid / "hf", 1, vocabulary=tokenizer.vocab_size)
    tokenizer._tokenizer.save_pretrained(valid / "hf")
    names = load_file(valid / "hf/model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}
    tiny_gguf(valid / "model.gguf")
    shutil.copy(ROOT / "docs/studies/qwen3_next.json", valid / "findings.json")
    for name, content in {
        "small.yaml": SMALL, "study.yaml": STUDY, "hf/model.safetensors.index.json": index,
        "results/results.json": {"status": "finished", "policy": "a", "sets": {"sums": SUMS}},
    }.items():  # fmt: skip
        (valid / name).parent.mkdir(exist_ok=True)
        (valid / name).write_text(json.dumps(content))
    data, benchmarks, saved = valid / "data", valid / "benchmarks", valid / "data/saved_data"
    for directory in (data, benchmarks, saved):
        directory.mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (data / "rows.jsonl").write_text(lines)
    (data / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    table = pa.Table.from_pylist([{"prompt": row["prompt"], "label": row["label"]} for row in ROWS])
    parquet.write_table(table, data / "rows.parquet")
    with pa.ipc.new_stream(saved / "data-00000-of-00001.arrow", table.schema) as stream:
        stream.write_table(table)
    (saved / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    for name, row in BENCHMARKS.items():
        (benchmarks / f"{name}.json").write_text(json.dumps([row]))
        (benchmarks / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    (benchmarks / "gsm8k.jsonl.gz").write_bytes(gzip.compress((benchmarks / "gsm8k.jsonl").read_bytes()))
