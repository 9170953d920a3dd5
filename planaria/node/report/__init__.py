"""What a run writes about itself.

- `events.py`: a class for each kind of event; `event_log.py` writes them
- `ledger.py`: a line for each committed step, and the audit
- `line_file.py`: files of lines, which stand a full or a stalled disk
- `log_stream.py`: a node's log; `logs.py`: `planaria logs`, which asks a node for it
- `samples.py`: the file of generated text
- `live_view.py`: the terminal while `planaria up` runs; `summary.py`: its end
- `history.py`: a run's events, within bounds; `run_state.py`: the state of a run, for all views
- `notifications.py`: of which events somebody should hear
- `experiment.py`: trackers (`--track`)
- `wall_clock.py`: where a node's time goes; `probe.py`: speed of machines and links
- `readable_console.py`: prints what strangers wrote; `unsaved.py`: stages that are only in memory
"""
