"""The needs and predicted time of a run on any cluster, without running it, as `--dry-run` prints."""
