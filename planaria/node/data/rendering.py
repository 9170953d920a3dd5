"""Chat templates in a process of their own.

A template is a program that comes with somebody's model. Jinja's sandbox keeps it from everything
but time and memory: `{{ 9 ** (9 ** 9) }}` takes for ever, and nothing in the same process can end
it. This process, which is the module's main, may be killed for it.

Lines of JSON go to it, first the template, then conversations; one comes back for each.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, Self

from planaria.bootstrap.spelling import readable
from planaria.node.data.chat import ChatTemplate, Conversation, Rendered, Template
from planaria.node.data.corpus import CorpusError, RowError

PATIENCE: Final = 10.0
"""Seconds of CPU time for a conversation, and for the template itself: they need a millisecond."""
MEMORY: Final = 1 << 30
"""Bytes, beside what the process has when it begins."""
LONGEST: Final = 256 << 20
"""Bytes of an answer."""


class Renderer:
    """Renders by a template. Raises CorpusError when it can't be read."""

    def __init__(self, template: Template, patience: float = PATIENCE) -> None:
        self._template, self._patience = template, patience
        command = [sys.executable, "-m", "planaria.node.data.rendering", str(patience)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            process_group=0,  # Ctrl-C is for who asks it, who then closes it
        )
        try:
            self._ask(template._asdict(), "it")
        except CorpusError:
            self.close()
            raise

    def render(self, conversation: Conversation) -> Rendered:
        """Raises CorpusError."""
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

    def _ask(self, question: dict[str, Any], what: str) -> dict[str, Any]:
        """Raises CorpusError."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps(question, default=str) + "\n")
            stdin.flush()
            line = stdout.readline(LONGEST)  # its timer ends it, if nothing else does
        except BrokenPipeError:
            line = ""
        if not line.endswith("\n"):
            raise CorpusError(f"{self._template.name} can't be used for {what}: {self._why(line)}")
        said: dict[str, Any] = json.loads(line)
        if refused := said.get("refused"):
            raise RowError(readable(refused))  # a template says what it likes
        return said

    def _why(self, line: str) -> str:
        """There is no whole answer."""
        if line:
            return f"it makes a text of more than {LONGEST >> 20} MiB"
        status = self._process.wait()
        if status == -signal.SIGPROF:
            return f"it takes more than {self._patience:g} s of CPU time; does it ever end?"
        return f"its process has ended with status {status}"


def main() -> None:
    patience = float(sys.argv[1])
    signal.setitimer(signal.ITIMER_PROF, patience)
    _limit_memory()
    template: ChatTemplate | None = None
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, patience)  # SIGPROF ends the process
        try:
            said = json.loads(line)
            if template is None:
                template, answer = ChatTemplate(**said), {}
            else:
                answer = template.render(Conversation(**said))._asdict()
            text = json.dumps(answer)
        except CorpusError as error:
            text = json.dumps({"refused": str(error)})
        except MemoryError:
            text = json.dumps({"refused": f"a template needs more than {MEMORY >> 30} GiB"})
        print(text, flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _limit_memory() -> None:
    """Where the system says how much there is already."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        size = int(statm.read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, hard))


if __name__ == "__main__":
    main()
