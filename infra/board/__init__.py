"""The live board: what every sample in the pipeline does right now, read from `events` alone.

    windows.py   ends and starts, counted over the last minute, five minutes, hour       pure
    sample.py    one sample: in which stage it is, since when, how it ended               pure
    board.py     all samples, bounded: in flight and oldest by stage, counts, states      pure
    view.py      what it shows, as data; the answer of `GET /board`
    feed.py      records of `events` into a board, each once; rebuilds one from the end of the log
    app.py       Faust: follows the topic, serves the view over HTTP; the only module that imports it
    guard.py     ends a board that stands still or grows, since its restart costs nothing

A read model: it commits for a group of its own alone, writes no topic, and nothing waits for it.
"""
