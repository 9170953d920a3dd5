"""Text generation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from planaria.node.data.corpus import load_tokenizer
from planaria.node.data.tokenizer import TOKENIZER, added_tokens, text_bounds
from planaria.node.hugging_face.whole_model import WholeModel


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Raises ValueError for invalid figures."""

    temperature: float = 0.8  # 0: always the likeliest
    top_p: float = 0.95  # smallest set of likeliest tokens with this probability
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"--temperature {self.temperature:g}: a number from 0 on")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p {self.top_p:g}: a number above 0, and 1 at most")


def generate(
    next_logits: Callable[[Tensor], Tensor],
    prompt: Sequence[int],
    tokens: int,
    context: int,
    sampling: Sampling,
    ends: Collection[int | None] = (),
) -> Iterator[int]:
    """Yield up to `tokens` tokens that a model writes after the prompt, until one of `ends`.

    `next_logits`: int64 [1, T], T at most `context`, to float32 [vocabulary] of the next token.
    Tokens beyond the context are dropped from the front. Raises ValueError for an empty prompt.
    """
    if not prompt:
        raise ValueError("the prompt has no tokens to continue: give a longer one")
    generator = torch.Generator().manual_seed(sampling.seed)
    known = list(prompt)
    for _ in range(tokens):
        logits = next_logits(torch.tensor([known[-context:]])).cpu()
        token = choose_token(logits, sampling, generator)
        if token in ends:
            return
        known.append(token)
        yield token


def choose_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Choose a token by its logits, float32 [vocabulary]: nucleus sampling (Holtzman et al., arXiv
    1904.09751). Raises ValueError for logits that aren't finite."""
    if not logits.isfinite().all():
        raise ValueError("the model's output isn't finite: it has diverged")
    if sampling.temperature == 0:
        return int(logits.argmax())
    shares, tokens = torch.softmax(logits / sampling.temperature, 0).sort(descending=True)
    before = shares.cumsum(0) - shares  # of all likelier ones
    shares = torch.where(before < sampling.top_p, shares, 0.0)
    return int(tokens[torch.multinomial(shares, 1, generator=generator)])


@dataclass(frozen=True)
class Speaker:
    """A model that generates text, local or remote, and its tokenizer."""

    next_logits: Callable[[Tensor], Tensor]  # see `generate`
    tokenizer: Tokenizer
    end: int | None  # token that ends a document
    vocabulary: int
    context: int
    folder: Path | None = None  # tokenizer's files, with the chat template

    @classmethod
    def of(cls, model: WholeModel, folder: Path) -> Speaker:
        """The speaker of a local model; `folder` has its tokenizer. Raises CorpusError."""
        tokenizer, config = load_tokenizer(folder / TOKENIZER), model.config
        end = text_bounds(tokenizer, folder).end

        def next_logits(known: Tensor) -> Tensor:
            return model.logits(known)[0, -1]

        return cls(next_logits, tokenizer, end, config.vocabulary, config.context, folder)


def continuation(speaker: Speaker, prompt: str, tokens: int, sampling: Sampling) -> Iterator[str]:
    """Yield a model's continuation of the prompt in pieces; after an empty one, a new document. The
    prompt begins with the tokenizer's begin tokens. Raises ValueError."""
    end = speaker.end
    context_tokens = encode_text(speaker, prompt, added_tokens(speaker.tokenizer)[0])
    if not context_tokens and end is not None:
        context_tokens = [end]
    following = generate(
        speaker.next_logits, context_tokens, tokens, speaker.context, sampling, ends=(end,)
    )
    return decode_pieces(speaker.tokenizer, list(context_tokens), following)


def encode_text(speaker: Speaker, text: str, begin: Sequence[int] = ()) -> list[int]:
    """Tokens of a text, behind those of `begin`. Raises ValueError for some the model hasn't, and
    for a text that isn't UTF-8."""
    tokenizer, most = speaker.tokenizer, speaker.vocabulary
    try:
        text.encode()
    except UnicodeEncodeError as error:
        before = text[: error.start][-20:]
        raise ValueError(f"the text is not UTF-8 behind {before!r}") from error
    tokens = [*begin, *tokenizer.encode(text, add_special_tokens=False).ids]
    if unknown := {token for token in tokens if token >= most}:
        names = ", ".join(f"{tokenizer.id_to_token(token)} ({token})" for token in sorted(unknown))
        size = max(tokenizer.get_vocab().values()) + 1
        raise ValueError(
            f"the tokenizer has {size - most} tokens more than the model, which has {most}; of "
            f"these the text has {names}: leave them out, or enlarge the model with transformers' "
            f"resize_token_embeddings({size})"
        )
    return tokens


def decode_pieces(tokenizer: Tokenizer, written: list[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of generated tokens, in whole characters; append them to `written`."""
    earlier = tokenizer.decode(written)
    for token in tokens:
        written.append(token)
        text = tokenizer.decode(written)
        if not text.endswith("\ufffd"):  # a character may take several tokens
            yield text[len(earlier) :]
            earlier = text
