"""Request traces: readers, and their replay against a pool of pages.

    request.py    one request of a trace, and the error that names a line and a field
    text.py, jsonl.py, csv_rows.py   lines of text, objects of JSON, rows of CSV
    mooncake.py bailian.py burstgpt.py azure.py plain.py   one format each
    formats.py    which format a file is in, and its requests
    blocks.py     a prompt's trace blocks as pages of the model;  arrivals.py, sessions.py  who comes, who is alive
    prompts.py    what a pool is asked for, in batches;  ahead.py  the same from a second process
    pool.py       a pool of pages under a policy
    replay.py     a trace through a pool: hit rate, bytes moved, evictions
    curve.py      hit rate at every pool size, from one pass over a sample
    tables.py     what is printed
    synthetic.py  a trace to measure with

Everything streams: memory grows with the pool, never with the trace.
"""
