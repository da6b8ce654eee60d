"""The entry point: `python -m kvplug.forwarder`. See `--help`, or docs/forwarder.md."""

import logging
import os
import signal
import sys
import threading

from kvplug.errors import KvplugError


def main(argv: list[str]) -> int:
    """Forward until SIGINT or SIGTERM; returns the exit code."""
    try:
        from kvplug.forwarder.arguments import parse
        from kvplug.forwarder.forwarder import Forwarder
        from kvplug.forwarder.status import StatusServer
    except (ModuleNotFoundError, KvplugError) as error:
        sys.stderr.write(f"kvplug.forwarder: {error}: pip install 'kvplug[router,nats]'\n")
        return 1
    config, log_level = parse(argv, os.environ)
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    try:
        forwarder = Forwarder(config.nats_settings, config.engines)
        status = StatusServer(forwarder, config.host, config.port)
        forwarder.start()
    except KvplugError as error:
        sys.stderr.write(f"kvplug.forwarder: {error}\n")
        return 1
    status.start()
    logging.getLogger(__name__).info(
        "forwards %d engines; /health and /metrics at %s", len(forwarder.engines), status.url
    )
    stopping.wait()
    status.stop()
    forwarder.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
