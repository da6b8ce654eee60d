"""KV events from ZMQ sockets of engines to NATS: `python -m kvplug.forwarder`."""
