"""The engines: which are up, what they serve, and whether their events arrive.

fleet          all of them, from their start to their end
worker         one of them as the router sees it
serving        which of them serve a model
health_checks  whether a worker is well, what it serves, where its events are
asking         what the router asks workers on its own
worker_url     where a worker's API is, if only its publisher says it
rank_sources   where an engine publishes the events of each rank; hosts says who reaches that
worker_events  a follower for each of them
ejection       workers that fail again and again are left out for a while
model_cards    what an engine says it serves
"""
