"""What a run tells of itself.

events.py has a class for each kind of event, event_log.py writes them; ledger.py has a line for
each committed step, and the audit. Both write by line_file.py, which stands a full disk and, in a
thread, one that stalls; so do log_stream.py, the log, and samples.py, text that the model makes.
Of events and ledger are made live_view.py (while `planaria up` runs) and summary.py (at the end);
status_page.py (`planaria status`) asks the registry, logs.py (`planaria logs`) a node.
wall_clock.py says where a node's time goes, probe.py what machines and links are good for.
experiment.py keeps a run where others keep their experiments (`--track`). progress.py is for what
shows how far it has come, readable_console.py for what strangers have said. unsaved.py says which
stages of a finished run are in memory only.
"""
