import pytest
import write_paper_claims

pytestmark = pytest.mark.lint


def test_the_page_of_the_papers_claims_has_the_tables_of_its_results():
    page = write_paper_claims.PAGE.read_text(encoding="utf-8")
    assert write_paper_claims.page_with_tables(page) == page, "run tools/write_paper_claims.py"
