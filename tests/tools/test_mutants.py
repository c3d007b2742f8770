from mutants import ROOT, is_in_function, read_mutants


def test_every_fault_of_the_list_fits_its_file_once():
    for mutant in read_mutants():
        source = (ROOT / mutant.file).read_text()
        assert mutant.planted(source) != source
        assert mutant.lines(source)


def test_only_a_functions_body_belongs_to_its_callers():
    source = "LIMIT = 3\n\n\ndef first(\n    most=LIMIT,\n):\n    return most\n"
    assert [line for line in range(1, 8) if is_in_function(source, {line})] == [7]
