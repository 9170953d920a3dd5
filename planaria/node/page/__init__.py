"""A run as people and Prometheus see it.

- `state.py`: from events and the registry's answer to what the page shows: one pure function
- `replay.py`: the same from a run's files, at any moment
- `app.py`: serves the page and its data; `http_server.py` listens and limits its clients
- `serving.py`: all of that, beside a registry or for a folder; `http_address.py`: its address
- `notifying.py`: beside a registry, too: runs the command of [notify]
- `metrics.py`: Prometheus
- `status_page.py`: `planaria status`
- `static/`: what the browser gets: page.html, page.css, page.js
"""
