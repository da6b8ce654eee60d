"""nginx forwards the bytes, the router decides: no part of an answer passes through Python.

configuration   the complete configuration file of nginx
decisions       a request -> the address of a worker; what nginx reports of it afterwards
ends            the datagrams in which nginx reports the ends of requests
front           writes the file, listens for nginx
"""
