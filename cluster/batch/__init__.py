"""`shoal batch`: a file of requests, answered once each, over any number of runs.

`rows.py` reads and judges the input, `index.py` knows which rows were met and which are recorded,
`output.py` keeps the file of outcomes, `server.py` speaks HTTP, `retry.py` says what is tried
again, `watch.py` knows whether the server can take rows and how many (`capacity.py`), `runner.py`
sends them, `report.py` and `display.py` tell of it, `job.py` puts one run together.
"""
