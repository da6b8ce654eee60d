"""NATS as everybody here uses it: where the servers are, one connection, the names of subjects.

settings    servers, credentials, the fleet
flags       the same, as command lines have it
subjects    names of subjects, of the stream, of buckets
connection  a connection that comes back by itself, on a thread of its own
server      a nats-server that this process starts

Needs `pip install 'kvplug[nats]'`. Engines use it, too: it imports neither the router nor Numba.
"""
