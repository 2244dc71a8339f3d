"""`outrider selftest --server`: everything that a first run on a GPU should show, in one command.

`plan.py` says which servers are started and with what, `parts.py` keeps each finished part on disk,
`ask.py` is what one server is asked, `result.py` compares bare SGLang with Outrider by the audit's
code, `page.py` and `terminal.py` show it, `run.py` is the command.
"""
