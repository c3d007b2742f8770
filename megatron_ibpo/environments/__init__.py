"""Environments of many turns: the protocol, adapters to those of the field, their processes, and the chat
format of turns as token ids."""
