"""One question, one answer, over a unix socket: how the processes of a run look into each other.

In:  a line of JSON.   Out: a document of JSON.
"""

import contextlib
import json
import logging
import os
import socket
import threading

_LIMIT_S = 30.0


def ask(path, question=None, *, limit_s=_LIMIT_S):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(limit_s)
        connection.connect(str(path))
        with connection.makefile("rw") as line:
            line.write(json.dumps(question) + "\n")
            line.flush()
            return json.loads(line.read())


def answer_in_background(path, answer):
    """Serve `answer(question)` from a thread, as long as the process lives."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of a process that was killed
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    threading.Thread(target=_serve, args=(listener, answer), daemon=True).start()


def _serve(listener, answer):
    while True:
        connection, _ = listener.accept()
        try:
            with connection, connection.makefile("rw") as line:
                line.write(json.dumps(answer(json.loads(line.readline()))))
        except Exception:  # the next question may be answered
            logging.exception("a question is not answered")
