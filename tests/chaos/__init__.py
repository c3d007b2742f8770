"""A campaign of kills: whatever ends or stops, a run comes to what a clean replay of its journal comes to."""
