"""Everything between nodes.

proto/planaria/node/wire/stage.proto has the messages, frames.py the frames that carry tensors,
tensors.py their payloads, lowrank.py those of the factors of a sum's matrices. link.py is a link:
messages and frames in order over gRPC streams that come and go.
session.py is what outlives them, idle.py says when nobody needs any, greetings.py how its ends
prove who they are, chunks.py the frames in pieces, streams.py says by how many streams these go,
ordering.py puts them in order again, round_trip.py has heartbeats say how long an answer takes,
background.py says how much of what can wait is under way, relays.py carries for two that can't
reach each other. outbox.py holds what waits for a link to come up, missing.py tells the
registry which doesn't. exchange.py is for conversations that wait for answers, looped.py runs them
on the event loop, budget.py bounds what waits to be read, measuring.py finds out how fast a link
is. onlookers.py answers who is no member, asking.py is what such a one uses.
"""
