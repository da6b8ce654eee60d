"""The HTTP routes, and what a request's body says.

app        the routes
admission  which requests may begin, and which wait
draining   how requests end when the router stops
endpoints  the engines' endpoints that are forwarded
reading    the body of a request, within its limits
asked      a body -> all that a decision needs
bodies     a request's body: what routing needs of it, what it asks for
prompts    its token ids, from kvplug.tokenization, or the reason why there are none
stored     responses that one engine has
sessions   what a request belongs to
"""
