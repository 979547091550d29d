"""`relaxpack db`: look after tuning records, and share them. Each command is one call into `relaxpack.dist.tuning` (or, for
`verify`, `relaxpack.tuning`) and prints what came of it.
"""

from __future__ import annotations

import click

from relaxpack.cli.db.care import prune, verify
from relaxpack.cli.db.files import export, import_
from relaxpack.cli.db.listing import diff, ls, show, stats
from relaxpack.cli.db.sharing import merge, pull, push


@click.group(short_help="Look after the tuning database.")
def db() -> None:
    """Look after tuning records, and share them.

    A database is an SQLite file, a PostgreSQL database (postgresql://USER:PASSWORD@HOST/NAME), or, to read only, bundles of
    records in a folder, on a web server or in a bucket (https://..., s3://...), or the word seed for those that come with
    relaxpack. Without --db it is that of $RELAXPACK_TUNING_DB, or else a file of this user's.

    \b
    Examples:
      relaxpack db ls --here                       what a build on this machine would use
      relaxpack db push postgresql://db/tuning     give the team what was tuned here
      relaxpack db pull s3://bucket/tuning         and take what others have
      relaxpack db import bundle.jsonl             the same by a file
      relaxpack db verify                          check the numbers, measure again
    """


for command in (ls, show, stats, diff, merge, push, pull, export, import_, verify, prune):
    db.add_command(command)
