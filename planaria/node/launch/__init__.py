"""All that comes before a node joins a run.

- `options.py`: options that several commands have; dataclasses as options of a command
- `node_options.py`: the options of `planaria node` and `planaria doctor`
- `begin.py`: checks the options of `planaria node` before torch is loaded
- `errors.py`: errors of a node that can't serve
- `supervisor.py`: the process that starts a node, and starts it again after a crash
- `own_folders.py`: where a node reads and writes
- `instance.py`: the node's key, which outlives its identities
- `enrolled.py`: how a node turns an invite into a certificate
- `secret_words.py`: secrets on a command line
- `advertised.py`: the address that peers dial
- `notices.py`: what clouds announce about the end of a spot instance
- `resolve.py`: the run file with what follows from preset and data
- `settings.py`: what of a run file may change while the run goes on
- `doctor.py`: finds out whether a node could join; `diagnosis.py` says what the facts mean
"""
