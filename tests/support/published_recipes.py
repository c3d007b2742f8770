from pathlib import Path

from megatron_ibpo.config import Config
from megatron_ibpo.run.settings import check_run, parse_config
from support.paths import ROOT

NEXT_80B = ROOT / "examples/models/qwen3_next_80b_a3b"
DENSE_32B = ROOT / "examples/models/qwen3_32b"
DENSE_4B = ROOT / "examples/models/qwen3_4b"
MIXTURE_30B = ROOT / "examples/models/qwen3_30b_a3b"
WRITTEN_FOR = {
    "qwen3_0_6b": 1, "qwen3_4b": 8, "qwen3_30b_a3b": 8, "qwen3_32b": 32, "qwen3_next_80b_a3b": 32,
    "qwen3_235b_a22b": 64,
}  # fmt: skip
"""GPUs of the recipe of each model."""
ONE_GPU = {
    "qwen3_0_6b_one_gpu": ("qwen3_0_6b", 24), "qwen3_0_6b_ibpo": ("qwen3_0_6b", 80),
    "qwen3_1_7b_one_gpu": ("qwen3_1_7b", 80), "qwen3_4b_one_gpu": ("qwen3_4b", 80),
}  # fmt: skip
"""Recipes for one GPU: the model and the nominal GB of the GPU."""
LIKE = {
    "qwen3_5_0_8b": "qwen3_0_6b", "llama_3_1_8b": "qwen3_4b", "qwen2_5_7b": "qwen3_4b",
    "qwen3_5_27b": "qwen3_32b", "llama_3_1_70b": "qwen3_32b", "qwen2_5_32b": "qwen3_32b",
    "qwen3_5_35b_a3b": "qwen3_30b_a3b", "gpt_oss_20b": "qwen3_30b_a3b",
    "glm_4_5_air": "qwen3_next_80b_a3b", "gpt_oss_120b": "qwen3_next_80b_a3b",
}  # fmt: skip
"""Models for which examples/run.sh takes the recipe of another."""
RECIPES = {
    ROOT / "examples/models" / name: ROOT / f"examples/recipes/{LIKE.get(name, name)}_ibpo.yaml"
    for name in (*WRITTEN_FOR, *LIKE)
}


def configured(model: Path, *flags: str, recipe: Path | None = None) -> Config:
    recipe = recipe or RECIPES.get(model, ROOT / "examples/recipes/tiny_qwen3_next_ibpo.yaml")
    config = parse_config(["--config", str(recipe), "--hf-checkpoint", str(model), "--dry-run", *flags])
    check_run(config)
    return config
