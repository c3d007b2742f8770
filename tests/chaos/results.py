import json


def read(path, seed):
    """The records of the campaign with this seed."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [record for record in map(json.loads, lines) if record["seed"] == seed]


def append(path, records):
    """A run's records, all at once: a campaign that is interrupted leaves no part of a run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))
