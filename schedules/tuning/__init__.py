"""What may be tuned and how one searches: spaces of our kernels and of TVM's schedules, the search, the rule of noise.
Builds and times nothing itself: `relaxpack.tuning` does, in other processes.
"""
