"""What a run would do, without running it: the plan that `--dry-run` prints."""
