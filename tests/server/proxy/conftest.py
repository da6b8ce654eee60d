"""What passes bytes is tested on the event loop that it has in `python -m kvplug.router`.

uvloop's transports are its own; the other tests of the server run on asyncio's.
"""

import uvloop


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}
