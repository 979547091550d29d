"""What `relaxpack explain` and `relaxpack diff` say, from the records of bundles: as data, and as a page."""
