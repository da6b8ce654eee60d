"""Which rank holds which blocks.

Start with block_index; each line below is a file.

the index
  block_index       BlockIndex: follow ranks, apply events, ask what each rank holds
  event_applier     the events of a rank, many at a time
  single_events     events one by one: whatever needs a decision
  packed_run        packed events of one payload, in slices
  event_buffers     what events pass through on their way into the arrays
  repeated_stores   engines that publish again what they hold
  event_values      whether an event that was made by hand can be one
  apply_result      what became of events: counts, and reasons to refuse
  prefix_query      what each rank holds of a request: PrefixQuery, Overlap
  block_copies      who holds a block, and where
  cache_groups      how much of a prefix each group of a hybrid model must hold
  lower_tiers       which copies in host memory and on disk can be used
  adapters          which namespaces are those of a LoRA adapter
what it is made of
  block_store       which holder has which block, made of the next three
  hash_table        uint64 -> uint64, the table of everything here
  run_table         runs: blocks in a row with one set of holders
  holder_sets       interned sets of holders
  holder_numbers    ranks and holders (a rank with a tier, or a pool) as numbers
  hash_spaces       engine hashes -> sequence hashes
  arrays            memory of large arrays, and who learns that one was replaced
blocks that leave
  sweeping          a clear, in slices
  evicting          an eviction from a full index: what goes, and what is remembered of it
  bounds            the limits, and whether blocks may come
what is known of blocks besides who holds them
  expiring          blocks that a rank is about to hold, or taken to hold: they count in queries
  block_annotation  the interface of everything else
  annotations       the list of annotations, and all of them in one hand
  cxl, cxl_states   blocks in CXL pools
  moe_labels        experts of blocks
files
  snapshot          an index to a file and back
  snapshot_file     the file
"""
