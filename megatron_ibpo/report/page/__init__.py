"""The page of runs and evaluations: live from a small server, or one file that needs none.

`directories` reads what is on disk, `groups` prepares samples, `html` assembles the page from the files in
browser/ and writes it as one file, and `server` serves it.
"""
