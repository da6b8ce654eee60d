"""The topics that engines publish under: `kv@<pod>@<model>`.

In:  the first frame of a message.   Out: which pod and model it is of, and what to subscribe to.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

PREFIX: Final = "kv@"
"""What all topics of this form begin with: a subscription to every pod."""


class Topic(Struct, frozen=True):
    """A pod, and the model that it serves; "" is any model."""

    pod: str
    model: str = ""

    @classmethod
    def parse(cls, text: str) -> Topic | None:
        """From `kv@<pod>` or `kv@<pod>@<model>`; None for topics of another form.

        A model may have further "@" in its name, a pod may not.
        """
        if not text.startswith(PREFIX):
            return None
        pod, _, model = text.removeprefix(PREFIX).partition("@")
        return cls(pod, model) if pod else None

    def __str__(self) -> str:
        return f"{PREFIX}{self.pod}@{self.model}"

    @property
    def subscription(self) -> str:
        """The prefix to subscribe to. It lets through what only begins with the model's name."""
        return str(self)

    def matches(self, other: Topic) -> bool:
        """Whether a message with the other topic is of this pod and model."""
        return self.pod == other.pod and self.model in ("", other.model)
