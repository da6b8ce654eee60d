"""`make demo`: some engines, the same requests under two policies, one table and one plot.

In:  an engine's name.   Out: the share of prompt tokens that the engines found in their caches,
under round_robin and under kv.

Read `comparison.py` first: the demo from its first line to its last.
"""
