"""The page of runs and evaluations: live from a small server, or one file that needs none.

`directories` reads what is on disk, `recorded_step`, `evaluation_samples` and `comparison` prepare the page's
data, `html` assembles the page from the files in browser/, `static` writes it as one file and `server` serves
it.
"""
