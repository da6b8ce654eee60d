"""Following engines: from event messages to the blocks of a Router. Needs no HTTP.

event_thread    receives the events of all engines, over any transport
dispatch        messages of many publishers on one endpoint to their followers
follower        one publisher's messages to one worker's blocks in the Router
sequencer       messages of a stock publisher, live and replayed, to payloads in order
life_sequencer  the same for publishers of ours: lives, gaps, asks
answer_order    whether an answer to an ask is one
replay          what an engine is asked to send again, and when
applying        payloads to the Router; what could not be used
introduction    what a publisher of ours says of its engine, to the Router
message_log     messages that wait, those that were applied last, and what applying them did
trust           how much of what an engine holds is known, and why not more
"""
