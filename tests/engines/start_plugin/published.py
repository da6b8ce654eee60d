"""What an engine publishes: of what kind, and which message of its stream is the last one."""

_NOTED_AS = {"bytes": "BlockRemoved", "tuple": "BlockStored"}


def last_number(publisher, num_batches):
    """Its number, -1 before the first one; None while batches are on their way to a message.

    A stock publisher sends each batch as a message. kvplug's plug-in puts several into one.
    """
    stream = getattr(publisher, "publisher", publisher)
    if hasattr(stream, "counters"):
        counters = stream.counters
        done = min(counters.num_received, counters.num_applied)
        return None if done < num_batches else counters.next - 1
    if not hasattr(stream, "life"):
        return num_batches - 1
    if stream.num_applied < num_batches:
        return None
    stream.life.hello()  # waits for the batches that are being applied
    return stream.life.position[1] - 1


def kind_of(event):
    """Of a vLLM event, or of a note of the recorder in its place."""
    name = type(event).__name__
    return _NOTED_AS.get(name, name)
