"""Several router replicas as one, over NATS: kept events, snapshots, load that is shared."""
