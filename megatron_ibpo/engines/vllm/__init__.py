"""The vLLM engine, in a separate process."""
