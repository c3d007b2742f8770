"""A campaign of kills: processes of a small run end or stop at random moments, and what the run comes to is
compared with a clean replay of its journal."""
