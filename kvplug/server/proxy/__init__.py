"""From a client to a worker and back.

listening    which connections are accepted
malformed    requests that are no HTTP
forwarding   one request to a worker and its answer back
deciding     what decided where it goes, in one word
upstream     which connection to a worker takes a request, and whose fault a failure is
connection   one connection to a worker: a request out, its answer in
relay        the stream of an answer from a worker to a client
client       an answer on its way to a client
asked        a request as it comes here: Forward
additions    what engines are asked for besides, and what is taken out again
continuation what is known of a stream, and how its rest reads
migrating    streams that broke off go on at other workers
answers      the events of a stream: where they end, which one has the first token
usage        what answers say of their tokens, in three dialects
"""
