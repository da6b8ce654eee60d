"""Third floor: following workers. Feeds a Router; needs no HTTP.

sequence   what a sequence number says about the message before it
follower   one publisher's messages to one worker's blocks
listener   the thread that owns the sockets: one per engine
dispatch   one socket's messages to the followers whose topics they carry
collector  the thread that owns a socket which many engines connect to
"""
