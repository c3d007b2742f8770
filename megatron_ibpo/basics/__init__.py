"""Plain records, text, seeds, user files and the trainers' processes: code that every room may use."""
