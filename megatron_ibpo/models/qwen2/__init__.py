"""Qwen2 and Qwen2.5, dense (https://huggingface.co/Qwen/Qwen2.5-7B-Instruct): a Llama whose projections to
queries, keys and values have biases. Qwen Team, "Qwen2.5 Technical Report", 2024."""
