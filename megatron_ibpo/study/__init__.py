"""What several runs tell together: methods compared at the same cost; and the audit of one run's credit."""

from megatron_ibpo.study.claims import compare_all
from megatron_ibpo.study.conduct import conduct
from megatron_ibpo.study.findings import read_findings
from megatron_ibpo.study.page import write_page
from megatron_ibpo.study.plan import Study
from megatron_ibpo.study.reading import read_study

__all__ = ["Study", "compare_all", "conduct", "read_findings", "read_study", "write_page"]
