"""First floor: which blocks are where.

block_index   BlockIndex: apply events, match requests, remove workers
holdings      the relation block x holder, in arrays
engine_hashes what an engine calls a block
expiring      blocks that a rank is taken to hold for a while, as it was sent them
hash_table    a growing open-addressing table over kernels/table.py
snapshot_file a file of flat arrays, written whole or not at all, read whole or refused
"""
