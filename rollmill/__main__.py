"""`python -m rollmill`: the same as `rollmill`, by the Python that runs now."""

from rollmill.cli import main

main()
