"""What is wrong with a fleet's set-up, by name and with the fix.

finding   Finding, its Code, and findings as text
facts     what an engine says of itself -> EngineFacts
probe     asks an engine over HTTP: its facts, and how it tokenizes
view      what is known of one worker: WorkerView
checks    WorkerViews -> findings; one function per cause
streams   the event streams of a fleet, as the doctor prints them
board     Diagnosis: keeps looking; logs what is new and what is over
doctor    `python -m kvplug.router doctor`: asks a router, or the engines without one
"""
