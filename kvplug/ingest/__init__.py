"""Third floor: following workers. Feeds a Router; needs no HTTP.

applier           payloads to the index of a Router
repair            messages, live and replayed, to payloads in order: gaps, restarts, late joins
applied_messages  the last number, what is known of the engine's blocks, and what that lacks
replay_*          what an engine is asked to send again, and when
held              live messages that wait for a replay
recent            which messages were applied last
trust             how much of what an engine holds is known, and why not more
skips             what could not be used
follower          one publisher's messages to one worker's blocks: all of the above
listener          the thread that owns the sockets: one per engine
dispatch          one socket's messages to the followers whose topics they carry
collector         the thread that owns a socket which many engines connect to
"""
