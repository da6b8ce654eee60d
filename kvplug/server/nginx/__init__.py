"""nginx moves the bytes, the router decides: no part of an answer passes through Python.

configuration   what nginx is told: a whole configuration file
decisions       a request to a worker's address; what nginx says of it afterwards
ends            the datagrams by which nginx says that requests are over
front           writes the file, listens for nginx
"""
