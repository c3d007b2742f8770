"""The processes of a run, on Ray: what runs where, from its start to its end."""
