"""Imported first by the server of ranks: the rest of its imports is no garbage. Ranks collect again."""

import gc

gc.disable()
