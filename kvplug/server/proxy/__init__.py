"""From a client to a worker and back.

listening    which connections are accepted
forwarding   one request to a worker and its answer back
upstream     which connection to a worker takes a request, and whose fault a failure is
connection   one connection to a worker: a request out, its answer in
relay        the stream of an answer from a worker to a client
client       an answer on its way to a client
answers      what they say of their tokens; where the events of a stream end
"""
