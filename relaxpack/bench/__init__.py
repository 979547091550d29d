"""Measuring served models: workloads from a seed, a load generator over HTTP, percentiles, pictures. Knows no engine."""
