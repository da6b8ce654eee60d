"""The HTTP routes, and what a request's body says.

app        the routes
bodies     a request's body: what routing needs of it, what it asks for
prompts    its token ids, from kvplug.tokenization, or the reason why there are none
sessions   what a request belongs to
"""
