"""Environments of many turns: the protocol, adapters to those of the field, their processes, and the chat
format of turns as token ids."""

from megatron_ibpo.environments.protocol import (
    Chat,
    Environment,
    EpisodeFaultError,
    EpisodeScore,
    Message,
    Opening,
    Session,
    Sessions,
    Tool,
    Turn,
)

__all__ = [
    "Chat",
    "Environment",
    "EpisodeFaultError",
    "EpisodeScore",
    "Message",
    "Opening",
    "Session",
    "Sessions",
    "Tool",
    "Turn",
]
