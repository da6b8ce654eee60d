"""First floor: which blocks are where.

block_index    BlockIndex: follow workers, ask what each rank holds
single_events  events one by one          event_applier  many events in one call of a kernel
applied        what became of events
the block store       the relation block x holder: tables, runs and sets
  hash_table   a growing table            run_table      growing runs
  holder_sets  growing sets               memory         where large arrays are
  array_version  whether an array has been replaced
holder_numbers ranks and tiers as numbers
hash spaces        engine hash spaces         hash space         one of them
asking         what each rank holds       overlap        the answer
besides        what is known of blocks besides who holds them
  expiring     what a rank is taken to hold for a while
  cxl          what is in CXL pools       cxl_states, pools
  moe_labels   experts
sweeping       clears, in slices
room           whether blocks may come    bounds         the limits
  evicting     what goes for them
snapshot       an index to a file         snapshot_file  the file
"""
