"""One file per figure: what Rollmill does beside what others do, on the same work, in the same call.

    python -m benchmarks NAME --json [--quick]      python -m benchmarks --all

`table.py` says which figures there are and what each must reach; `rounds.py` how both sides are measured; `result.py`
what is printed. The product runs with its defaults; nothing here is tuned for a figure.
"""
