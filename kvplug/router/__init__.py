"""Second floor: deciding which worker gets a request.

core      Router: the request path, readable in one screen
config    RouterConfig: every knob, checked once
cost      what a request would cost on each rank
load      what each rank is busy with
observer  what a Router reports of that, and of events
policies  one rank out of the candidates
"""
