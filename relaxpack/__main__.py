"""`python -m relaxpack`."""

from relaxpack.cli import main

main()
