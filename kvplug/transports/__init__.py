"""Second floor: moving bytes. Knows no router and no index.

zmq     a subscription to one engine's stock event publisher
"""
