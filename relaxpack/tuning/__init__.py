"""Tuning: which kernels of a model are worth it, building and timing candidates in other processes, and records in builds.
"""
