"""Asks models the questions of shop.py: `python ask.py DIR...` prints a table of their answers.

Each answer is what `planaria generate DIR --chat QUESTION --temperature 0` prints, 40 tokens at
most. It is right if the fact's words are in it.
"""

from __future__ import annotations

import subprocess
import sys

from shop import FACTS


def answer(model: str, question: str) -> str:
    """Greedy, on one line. Raises CalledProcessError."""
    command = ["planaria", "generate", model, "--chat", question, "--temperature", "0"]
    command += ["--tokens", "40"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return " ".join(done.stdout.split())


def row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main(*models: str) -> None:
    print(row("question", *models))
    print(row(*["---"] * (1 + len(models))))
    right = dict.fromkeys(models, 0)
    for fact in FACTS:
        answers = [answer(model, fact.asked) for model in models]
        for model, text in zip(models, answers, strict=True):
            right[model] += fact.answer.lower() in text.lower()
        print(row(fact.asked, *answers), flush=True)
    print(row("right", *(f"{count} of {len(FACTS)}" for count in right.values())))


if __name__ == "__main__":
    main(*sys.argv[1:])
