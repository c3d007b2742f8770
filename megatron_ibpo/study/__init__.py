"""Comparison of several runs: methods at the same cost; and the audit of one run's credit."""
