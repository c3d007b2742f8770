"""Plain records, text, seeds, user files and the trainers' process groups: code that every package may
use."""
