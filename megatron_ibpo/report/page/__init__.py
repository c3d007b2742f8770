"""The page of runs and evaluations: live from a small server, or one file that needs none.

`sources` reads what is on disk, `samples` and `evaluations` prepare the page's data, `code` assembles the
page from the files in browser/, `static` writes it as one file and `server` serves it.
"""
