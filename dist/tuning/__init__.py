"""Tuning records at rest and on their way: the store (SQLite or PostgreSQL), the merge rule, exchange through any fsspec
URL. Needs the extra `relaxpack[tuning]`; the runtime never imports it.
"""

import importlib.util

from relaxpack.errors import EnvironmentProblem

if importlib.util.find_spec("sqlalchemy") is None:
    raise EnvironmentProblem("the tuning database needs SQLAlchemy: pip install 'relaxpack[tuning]'")
