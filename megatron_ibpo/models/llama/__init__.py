"""Llama 2 and 3 (https://huggingface.co/meta-llama) and the many dense models of their form, such as SmolLM2
(https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct). Grattafiori et al., "The Llama 3 Herd of
Models", 2024."""
