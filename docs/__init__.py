"""The documentation; `refresh.py` writes the parts of it that come from the code."""
