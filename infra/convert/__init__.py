"""Groups of siblings in the layouts of other training frameworks.

`verl.py` and `nemo_rl.py` give plain dictionaries of numpy arrays, by the frameworks' own names, and turn them into
their classes where they are installed. Neither they nor torch are needed otherwise. What is trained is the reader's
business: rewards are here as the log has them, advantages are not made.
"""
