"""Plain records, text, seeds, user files and the trainers' process groups: for every package."""
