"""Tuning records at rest and on their way: the store (SQLite or PostgreSQL), the merge rule, exchange through any fsspec
URL, TVM's two-file JSON. Needs the extra `relaxpack[tuning]`; the runtime never imports it.
"""
