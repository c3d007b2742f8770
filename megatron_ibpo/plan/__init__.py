"""What a run would need and take on any cluster, without running it: the plan that `--dry-run` prints."""
