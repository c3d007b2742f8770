"""The sandbox for code that a model wrote."""

from megatron_ibpo.rewards.sandbox.bubblewrap import SandboxError
from megatron_ibpo.rewards.sandbox.process import Execution, Limits, Process, Reached

__all__ = ["Execution", "Limits", "Process", "Reached", "SandboxError"]
