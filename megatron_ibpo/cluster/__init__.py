"""The processes of a run on Ray: placed, started, called and ended."""
