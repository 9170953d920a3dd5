"""The page that a browser shows of a run, and what Prometheus is told of it.

history.py keeps what events say, within bounds, whoever said it. state.py is one pure function from
that and the registry's answer to what is on the page; replay.py makes the same of a run's files, at
any moment of it. place.py says where it is to be had; app.py hands it out, http_server.py listens,
and stands whoever is slow or many; metrics.py has the figures that Prometheus asks for; serving.py
is all of that beside a registry, or of a folder. static/ is what the browser gets: page.html,
page.css and page.js, as they are.
"""
