"""Everything between nodes. The messages are in proto/planaria/node/wire/stage.proto.

Frames:

- `frame_format.py`: a frame, which carries tensors; `tensors.py`: their encodings; `lowrank.py`:
  compressed gradients
- `seat_names.py`: names of seats; `commit_chain.py`: the chain of commits

A link:

- `link_table.py`: which links there are, and who dials; `link.py`: dials and accepts
- `connection.py`: a link, and the streams that carry it until they break
- `session.py`: what outlives a stream; `greetings.py`: how the ends prove who they are
- `chunk_flow.py`: frames in pieces; `streams.py`: over how many streams
- `round_trip.py`: round-trip time; `link_speed.py`: speed; `background.py`: bulk transfers give way
- `idle_links.py`: links that nobody needs; `missing_links.py`: links that don't come up, for the
  registry
- `outbox.py`: what waits for a link; `relays.py`: a way through a third node

Conversations:

- `exchange.py`: conversations with peers, on the event loop
- `budget.py`: memory for what waits to be read
- `observers.py`: answers clients that are no members; `observer_client.py`: such a client
"""
