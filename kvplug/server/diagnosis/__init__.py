"""What is wrong with a fleet's set-up, by name and with the fix.

finding   Finding, Code
facts     what an engine says of itself -> EngineFacts
probe     asks an engine over HTTP; tokenization compares what it makes of a text
view      what is known of one worker: WorkerView; recent: which counts grew of late
checks    WorkerViews -> findings; one function per cause
board     Diagnosis: keeps looking; logs what is new and what is over
doctor    `python -m kvplug.router doctor`; table prints, direct asks without a router
"""
