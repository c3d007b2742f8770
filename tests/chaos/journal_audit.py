from megatron_ibpo.journal import read_journal


def audit(directory, *, steps, responses, sampling):
    """What is wrong with a finished run's journal; `sampling`: its last checkpoint's `cursor` and `open`."""
    recovered = read_journal(directory, 0)
    problems = [f"the journal cannot be read whole: {note}" for note in recovered.notes]
    found = [batch.step for batch in recovered.batches]
    if found != list(range(1, steps + 1)):
        problems.append(f"{steps} steps were taken, the journal has whole batches of {found}")
    taken, trained, given_up = {}, set(), set()
    for batch in recovered.batches:
        for group in batch.groups:
            if group.id in taken:
                problems.append(f"{group.id} was trained at steps {taken[group.id]} and {batch.step}")
            elif group.prompt_index in trained:
                problems.append(f"prompt {group.prompt_index} was trained twice, under two attempts")
            taken[group.id] = batch.step
            trained.add(group.prompt_index)
            if group.responses != responses:
                problems.append(f"{group.id} was trained with {group.responses} of {responses} responses")
        given_up |= {group.id for group in batch.dropped}
    problems += [f"{group} was dropped and trained" for group in sorted(given_up & taken.keys())]
    left = {(index, attempt) for index, attempt in sampling["open"]}
    sampled = {key.group for key in recovered.samples}
    for group in sorted(sampled - taken.keys() - left):
        if group[0] < sampling["cursor"]:
            problems.append(f"samples of {group} stand in the journal, but it is in no batch, nor open")
    known = trained | {index for index, _ in left}
    problems += [f"prompt {index} is lost" for index in sorted(set(range(sampling["cursor"])) - known)]
    return problems
