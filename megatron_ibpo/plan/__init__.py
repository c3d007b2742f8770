"""The needs and predicted time of a run on any cluster, without running it: the plan that `--dry-run`
prints."""
