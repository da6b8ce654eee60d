"""KV events from ZMQ sockets of engines to NATS: `python -m kvplug.forwarder`.

config       what it is told
arguments    the same, from a command line
forwarder    Forwarder: all engines, one event thread, one connection
engine       one publisher of an engine: its stream in, its subjects out
stock_wire   what a stock publisher says, as a life of kvplug's own stream
doubts       what of it is not known, as readers are told
own_wire     kvplug's own stream, passed on as it is
output       the subjects of one publisher on NATS
status       /health and /metrics

It imports neither the router nor Numba.
"""
