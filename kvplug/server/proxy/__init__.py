"""From a client to a worker and back.

listening    which connections are accepted
forwarding   one request to a worker and its answer back
upstream     one POST to a worker, and whose fault a failure is
answers      what they say of their tokens; where the events of a stream end
"""
