"""What several runs tell together: methods compared at the same cost; and the audit of one run's credit."""

from megatron_ibpo.study.conduct import conduct
from megatron_ibpo.study.plan import Study, read_study

__all__ = ["Study", "conduct", "read_study"]
