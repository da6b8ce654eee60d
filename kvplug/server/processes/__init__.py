"""Several processes that serve as one router (`--processes N`): one index, one port, one answer.

supervisor  starts them, starts again what dies, ends all of them
writer      follows events and writes the index; serves nobody
reader      serves requests, by the index that the writer writes
peers       /metrics and /health of any of them speak for all
"""
