import pytest
import write_paper_claims

from megatron_ibpo.report.summary import break_even_lines
from megatron_ibpo.study.findings import read_findings
from megatron_ibpo.study.run_results import compare

pytestmark = pytest.mark.lint


def test_the_paper_claims_page_has_its_results_tables():
    page = write_paper_claims.PAGE.read_text(encoding="utf-8")
    assert write_paper_claims.page_with_tables(page) == page, "run tools/write_paper_claims.py"


def test_a_run_closes_with_the_default_studys_findings():
    findings = read_findings(write_paper_claims.RESULTS / "default_run.json.gz")
    gspo, ibpo = (line["cost_to_threshold"]["median"] for line in compare(findings.study, findings.runs))
    rate = {"estimate": 0.5, "low": 0.4, "high": 0.6}
    alone = {"alone": {"resample": rate, "skill": rate, "needed": 0.9, "pays": False}}
    closing = break_even_lines({"price": 2.5} | alone)[-1]
    assert f"with {gspo / ibpo:.0%} of the operations of IBPO" in closing.replace(" %", "%")
    assert f"reward of {findings.study.threshold:.2f}".replace("0.", ".") in closing
