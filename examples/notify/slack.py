"""[notify] command = "python3 examples/notify/slack.py https://hooks.slack.com/services/..." """

import json
import sys
import urllib.request

event = json.load(sys.stdin)
text = f"{event['severity']}: {event['run']}, step {event['step']}: {event['sentence']}"
message = json.dumps({"text": text}).encode()
header = {"Content-Type": "application/json"}
urllib.request.urlopen(urllib.request.Request(sys.argv[1], message, header), timeout=20)
