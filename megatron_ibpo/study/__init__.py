"""What several runs tell together: methods compared at the same cost; and the audit of one run's credit.

Nothing is imported here: a run measures its corrections by one file of this room and must not wait for the
libraries of the others.
"""
