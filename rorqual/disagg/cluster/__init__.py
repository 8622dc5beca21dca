"""Workers on several machines behind one front: Ray places and supervises them, this package only chooses among them.

config       the cluster's TOML, checked by name
routing      the one function that picks a worker
job          what travels between the front and the workers
told         what a client has been told of a request, so that a second run of it goes on from there
loop         a worker's engine in a thread of its own, asked from an event loop
placing      who holds what and does how much, and where a job goes
actors       `PrefillActor`, `DecodeActor`: the workers as Ray runs them
supervisor   Ray, the store's master and the actors: up, found again, described, down
front        `Front`: what a server asks of an engine, over the cluster
"""
