"""What every room may use: records, text, seeds, files of the user, the trainers' processes."""
