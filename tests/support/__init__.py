"""Modules here hold what several test files share."""
