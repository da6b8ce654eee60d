"""What a program says when it cannot go on: one sentence, and the log's end as a note."""


class LaunchError(Exception):
    """A sentence for the person at the terminal; details, such as a log's end, are its notes."""
