#!/bin/sh
# [notify] command = "sh examples/notify/mail.sh you@example.org"
# Needs a working `mail`. The event is the body, as JSON.
exec mail -s "planaria: the run needs you" "$1"
