"""Several processes that serve as one router (`--processes N`): one index, one port, one answer.

supervisor  starts them, restarts those that die, ends all of them
writer      follows events and writes the index; serves no requests
reader      serves requests, with the index that the writer writes
peers       /metrics and /health of any of them, for all of them
merging     the metrics of several as one text
last_page   the counters of one that was killed
"""
