"""Following engines: from event messages to the blocks of a Router. Needs no HTTP.

event_thread  receives the events of all engines, over any transport
dispatch      messages of many publishers on one endpoint to their followers
follower      one publisher's messages to one worker's blocks in the Router
sequencer     messages, live and replayed, to payloads in order: gaps, restarts, late joins
replay        what an engine is asked to send again, and when
message_log   messages that wait, those that were applied last, and what applying them did
trust         how much of what an engine holds is known, and why not more
"""
