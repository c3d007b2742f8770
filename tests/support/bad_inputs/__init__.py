"""Inputs of every kind that a user gives, made wrong by a seed and handed to the commands that read them."""
