"""Comparison of several runs: methods at the same cost; and the audit of one run's credit.

Nothing is imported here: a run uses one file of this package to measure its corrections, and must not wait
for the libraries of the others.
"""
