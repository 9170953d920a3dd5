"""Chat templates in a process of their own.

A template is an untrusted program. Jinja's sandbox doesn't limit time and memory: `{{ 9 ** (9 ** 9)
}}` never ends, and nothing in the same process can stop it. This module is the main of a process
that may be killed for it.

Its input is lines of JSON, first the template, then conversations; it answers each with one.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from planaria.bootstrap.escaping import readable
from planaria.node.data.chat import ChatTemplate, Conversation, Rendered, Template
from planaria.node.data.corpus import CorpusError, RowError

PATIENCE: Final = 10.0
"""CPU seconds for a rendering, and for the template itself: they need a millisecond."""
MEMORY: Final = 1 << 30
"""Memory limit in bytes, beside the process's initial size."""
LONGEST: Final = 256 << 20
"""Size limit of an answer in bytes."""


class Renderer:
    """Renders conversations by a chat template in a child process. Raises CorpusError."""

    def __init__(self, template: Template, patience: float = PATIENCE) -> None:
        self._template, self._patience = template, patience
        command = [sys.executable, "-m", "planaria.node.data.template_process", str(patience)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            process_group=0,  # Ctrl-C reaches the parent, which closes it
        )
        try:
            self._ask(template._asdict(), "it")
        except CorpusError:
            self.close()
            raise

    def render(self, conversation: Conversation) -> Rendered:
        """A conversation rendered by the child process. Raises CorpusError."""
        answer = self._ask(conversation._asdict(), conversation.place)
        spans = [(first, end) for first, end in answer["scored"]]
        return Rendered(answer["text"], spans, answer["open_end"])

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, question: dict[str, Any], place: str) -> dict[str, Any]:
        """Send one line to the child process, and read the answer. Raises CorpusError."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps(question, default=str) + "\n")
            stdin.flush()
            line = stdout.readline(LONGEST)  # its timer ends the process at the latest
        except BrokenPipeError:
            line = ""
        if not line.endswith("\n"):
            raise CorpusError(f"{self._template.name} can't be used for {place}: {self._why(line)}")
        answer: dict[str, Any] = json.loads(line)
        if refused := answer.get("refused"):
            raise RowError(readable(refused))  # a template may raise any text
        return answer

    def _why(self, line: str) -> str:
        """Reason for an incomplete answer of the child process."""
        if line:
            return f"it makes a text of more than {LONGEST >> 20} MiB"
        status = self._process.wait()
        if status == -signal.SIGPROF:
            return f"it takes more than {self._patience:g} s of CPU time: look for an endless loop"
        return f"its process has ended with status {status}"


def main() -> None:
    # SIGPROF ends the process
    begin_anew = partial(signal.setitimer, signal.ITIMER_PROF, float(sys.argv[1]))
    begin_anew()
    _limit_memory()
    template: ChatTemplate | None = None
    for line in sys.stdin:
        begin_anew()
        try:
            request = json.loads(line)
            if template is None:
                template, answer = ChatTemplate(Template(**request), begin_anew), {}
            else:
                answer = template.render(Conversation(**request))._asdict()
            text = json.dumps(answer)
        except CorpusError as error:
            text = json.dumps({"refused": str(error)})
        except MemoryError:
            text = json.dumps({"refused": f"a template needs more than {MEMORY >> 30} GiB"})
        print(text, flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _limit_memory() -> None:
    """Limit this process's address space, where /proc tells its current size."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        size = int(statm.read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, hard))


if __name__ == "__main__":
    main()
