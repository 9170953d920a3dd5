"""Recipe of prepared data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeVar

from planaria.node.data.chat import Conversation, Template, template_of
from planaria.node.data.corpus import CorpusError, RowError
from planaria.node.data.documents import Row, documents, files_of
from planaria.node.data.file_access import Listing
from planaria.node.data.messages import Completion
from planaria.node.data.options import PrepareOptions

T = TypeVar("T")
ALWAYS_SKIPPED: Final = 10
"""Number of bad rows that are always left out."""
HOPELESS: Final = 1000
"""Number of bad rows that ends a file, if most of its rows so far are bad."""
SHOWN: Final = 3
"""Number of reasons in a message."""
COMPLETIONS: Final = Template("", "prompts with completions", {})
"""Placeholder instead of a template: texts of which a part is scored."""


@dataclass(frozen=True)
class Recipe(PrepareOptions):
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
        if not 0 <= self.skip_bad <= 1:
            raise CorpusError(f"--skip-bad is a share between 0 and 1, not {self.skip_bad}")
        separator = self.document_separator or ""
        try:
            re.compile(separator)
        except re.error as error:
            raise CorpusError(
                f"--document-separator {separator!r} is not a regular expression: {error}"
            ) from error

    def files(self) -> Listing:
        """The input files in order. Raises CorpusError."""
        listing = Listing()
        for source in self.inputs:
            listing.extend(files_of(source))
        return listing

    @property
    def reading(self) -> list[object]:
        """The options that decide, beside the input files, which documents exist."""
        return [self.text_field, self.document_separator, self.longest_record, self.format]

    def documents(self, file: str) -> Iterator[Row | RowError]:
        """The documents of one input file. Raises CorpusError, also when most rows are bad."""
        separator = None if self.document_separator is None else re.compile(self.document_separator)
        rows = documents(file, self.text_field, separator, self.longest_record, self.format)
        return limit_bad_rows(rows, self.skip_bad)

    def check_bad_rows(self, bad: int, rows: int, reasons: Iterable[str]) -> None:
        """Check that no more input rows are bad than may be left out. Raises CorpusError."""
        if bad > max(ALWAYS_SKIPPED, self.skip_bad * rows):
            raise CorpusError(
                f"{bad} of {rows} rows can't be prepared, which is more than --skip-bad "
                f"{self.skip_bad:g} leaves out: {first_reasons(reasons)}"
            )

    def template(self, files: Sequence[str]) -> Template | None:
        """The chat template for the input; None: it has only texts. Raises CorpusError."""
        rows = (row for file in files for row in self.documents(file))
        first = next((row for row in rows if not isinstance(row, RowError)), None)
        if not isinstance(first, Conversation) and self.chat_template is not None:
            raise CorpusError(
                f"--chat-template {self.chat_template} is for records with messages, but the first "
                "document is a text: leave it out"
            )
        if not isinstance(first, Conversation | Completion):
            return None
        if self.tokenizer is None:
            raise CorpusError(
                "conversations need the tokenizer of the model to train: give its tokenizer.json "
                "with --tokenizer; the chat template is found beside it"
            )
        if isinstance(first, Completion):
            return COMPLETIONS
        if self.bos != "auto":
            raise CorpusError(
                f"--bos {self.bos} is for texts: leave it out, since a conversation begins as its "
                "chat template says"
            )
        template = template_of(self.tokenizer, self.chat_template)
        if self.end_token is not None:
            template.special_tokens["eos_token"] = self.end_token
        return template


def limit_bad_rows(rows: Iterable[T | RowError], skip_bad: float) -> Iterator[T | RowError]:
    """Pass on a file's rows. Raises CorpusError when half, and the share `skip_bad`, are bad."""
    bad, reasons = 0, list[str]()
    for number, row in enumerate(rows, 1):
        if isinstance(row, RowError):
            bad += 1
            reasons += [str(row)] if bad <= SHOWN else []
            if bad >= HOPELESS and bad > max(0.5, skip_bad) * number:
                raise CorpusError(
                    f"{bad} of the first {number} rows can't be prepared: {first_reasons(reasons)}"
                )
        yield row


def first_reasons(reasons: Iterable[str]) -> str:
    """The first SHOWN reasons for bad rows, in words."""
    return "; ".join(islice(reasons, SHOWN))
