"""What arrives on an event socket, damaged in every way, against what must hold whatever arrives.

corpus   real and generated messages to begin with
mutate   ways to damage a message
target   who reads the messages, and what must hold after each one
run      as many as fit into a time: make fuzz
"""
