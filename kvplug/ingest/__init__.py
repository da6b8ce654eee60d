"""Following engines: from event messages to the blocks of a Router. Needs no HTTP.

event_thread  receives the events of all engines, over any transport
dispatch      messages of many publishers on one endpoint to their followers
follower      one publisher's messages to one worker's blocks: all of the following
sequencer     messages, live and replayed, to payloads in order: gaps, restarts, late joins
replay        what an engine is asked to send again, and when
message_log   messages that wait, and those that were applied last
applier       payloads to the index of a Router
trust         how much of what an engine holds is known, and why not more
"""
