"""What is to be prepared, and how."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from planaria.node.data.chat import Conversation, Template, template_of
from planaria.node.data.corpus import CorpusError
from planaria.node.data.documents import documents, files_of
from planaria.node.data.tokenizer import Bos


@dataclass(frozen=True)
class Recipe:
    """Raises CorpusError for figures that make no sense."""

    inputs: Sequence[str]
    tokenizer: Path | None = None  # a tokenizer.json; None: train one
    vocabulary: int = 2048  # of the tokenizer to train
    validation: float = 0.05  # share of the documents to hold out
    text_field: str = "text"
    separator: str | None = None  # see documents.lines_to_documents
    chat_template: Path | None = None  # None: the tokenizer's
    bos: Bos = "auto"  # see tokenizer.bounds_of; so for end_token
    end_token: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.validation < 1:
            raise CorpusError(
                f"--validation is a share between 0 and 1, not {self.validation}: "
                "0.05 holds out one document in twenty"
            )
        if self.vocabulary < 257:
            raise CorpusError(
                f"--vocabulary {self.vocabulary} is too small: 256 bytes and the end of a document "
                "need 257"
            )
        if not self.inputs:
            raise CorpusError("nothing to prepare: name a text file, a folder or a dataset")
        try:
            re.compile(self.separator or "")
        except re.error as error:
            raise CorpusError(
                f"--document-separator {self.separator!r} is not a regular expression: {error}"
            ) from error

    def files(self) -> list[str]:
        """In order. Raises CorpusError."""
        return [file for source in self.inputs for file in files_of(source)]

    def documents(self, file: str) -> Iterator[str | Conversation]:
        """Of one of the files. Raises CorpusError."""
        separator = None if self.separator is None else re.compile(self.separator)
        return documents(file, self.text_field, separator)

    def template(self, files: Sequence[str]) -> Template | None:
        """By which conversations become text; None when there are texts. Raises CorpusError."""
        first = next((one for file in files for one in self.documents(file)), None)
        if not isinstance(first, Conversation):
            if self.chat_template is not None:
                raise CorpusError(
                    f"--chat-template {self.chat_template} is for records with messages, and the "
                    "first document is a text"
                )
            return None
        if self.tokenizer is None:
            raise CorpusError(
                "records with messages need the tokenizer of the model that is to learn from them: "
                "give its tokenizer.json with --tokenizer; the chat template is found beside it"
            )
        if self.bos != "auto":
            raise CorpusError(
                f"--bos {self.bos} is for texts: how a conversation begins its chat template says"
            )
        return template_of(self.tokenizer, self.chat_template)
