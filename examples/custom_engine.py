"""An engine of your own tells routers what it caches: python -m examples.custom_engine."""

from kvplug import KvEventPublisher

BLOCK_SIZE = 16
PROMPT = list(range(3 * BLOCK_SIZE))


def publish(publisher: KvEventPublisher) -> None:
    """Cache three blocks of a prompt, and evict the last one."""
    sizes = [BLOCK_SIZE] * 3
    publisher.publish_stored(token_ids=PROMPT, num_block_tokens=sizes, block_hashes=[71, 72, 73])
    publisher.publish_removed(block_hashes=[73])


def main() -> None:
    """Publish until somebody presses Enter."""
    with KvEventPublisher(kv_block_size=BLOCK_SIZE, model="my-model") as publisher:
        publish(publisher)
        input(f"publishing at {publisher.endpoint}; Enter ends it")


if __name__ == "__main__":
    main()
