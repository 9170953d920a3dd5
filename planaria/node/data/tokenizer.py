"""Tokenizer files: the tokens that bound a text, and equality of tokenizers.

transformers 5 puts around a text what the post-processor in tokenizer.json says, and ignores
`add_bos_token` and `add_eos_token` of tokenizer_config.json. So does this module.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from planaria.bootstrap.files import read_small
from planaria.node.data.corpus import CorpusError, file_checksum, load_tokenizer
from planaria.node.data.options import Bos

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER: Final = "tokenizer.json"
CONFIG: Final = "tokenizer_config.json"
SPECIAL: Final = "special_tokens_map.json"
TEMPLATE: Final = "chat_template.jinja"
TEMPLATES: Final = "additional_chat_templates/*.jinja"
DEFAULT, FOR_TOOLS = "default", "tool_use"
"""Names of chat templates: of conversations without tools, and with tools if it exists."""
SHARED: Final = (TOKENIZER, CONFIG, TEMPLATE, "generation_config.json", "index.json")
"""Files of prepared data or a model that define the tokenization; nodes send them to clients that
may read. Some may be missing; the index is written last."""
LONGEST: Final = 4096
"""Default limit of tokens per sample for an imported model."""
PART: Final = 1 << 20
"""Bytes of a SHARED file per answer."""
UNBOUNDED: Final = 1e9
"""Lower bound of placeholders: transformers writes a model_max_length of 1e30 if unknown."""
PROBE: Final = (1 << 32) - 1
"""A token that no tokenizer has."""
DECIDING: Final = ("added_tokens", "normalizer", "pre_tokenizer", "model")
"""Parts of tokenizer.json that decide the tokens of a text."""
PLAIN: Final[dict[str, Any]] = {
    "clean_up_tokenization_spaces": False,
    "tokenizer_class": "PreTrainedTokenizerFast",
}
"""Default tokenizer_config.json of a tokenizer without one."""
INPUTS: Final[dict[str, Any]] = {"model_input_names": ["input_ids", "attention_mask"]}
REBUILT: Final = {"GPT2Tokenizer": INPUTS, "LlamaTokenizer": INPUTS | {"padding_side": "left"}}
"""Classes of transformers 5 that ignore normalizer and pre-tokenizer of tokenizer.json, with their
other defaults."""


class TextBounds(NamedTuple):
    """The tokens around a text that training reads."""

    begin: tuple[int, ...]  # before each text
    end: int | None  # behind each document; None: unknown


def text_bounds(
    tokenizer: Tokenizer, folder: Path, bos: Bos = "auto", end_token: str | None = None
) -> TextBounds:
    """The tokens around a text by a tokenizer whose files are in `folder`.

    `bos`: "auto" is what the post-processor puts before a text; "yes" is the bos_token where that
    is nothing; "no" is nothing. `end_token` overrides the files. Raises CorpusError for a token
    that the tokenizer doesn't have.
    """
    before, behind = added_tokens(tokenizer)
    named = special_tokens(folder)
    if bos == "no":
        before = ()
    elif bos == "yes" and not before:
        begin = _named_token(tokenizer, folder, named, "bos")
        if begin is None:
            raise CorpusError(f"--bos yes: no file in {folder} names a bos_token")
        before = (begin,)
    if end_token is not None:
        end = tokenizer.token_to_id(end_token)
        if end is None:
            raise CorpusError(
                f"--end-token {end_token}: the tokenizer has no such token; "
                f"{describe_special_tokens(tokenizer)}"
            )
    elif len(behind) > 1:
        raise CorpusError(
            f"the {TOKENIZER} in {folder} ends a text with {len(behind)} tokens, but a document "
            f"must end with one: name it with --end-token; {describe_special_tokens(tokenizer)}"
        )
    elif behind:
        [end] = behind
    else:
        end = _named_token(tokenizer, folder, named, "eos")
    return TextBounds(before, end)


def added_tokens(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens that a tokenizer's post-processor puts before and behind a text, as transformers
    does."""
    from tokenizers import Tokenizer, models

    if tokenizer.post_processor is None:
        return (), ()
    text = Tokenizer(models.WordLevel({"a": PROBE})).encode("a")
    whole = tokenizer.post_processor.process(text).ids
    start = whole.index(PROBE)
    return tuple(whole[:start]), tuple(whole[start + 1 :])


def special_tokens(folder: Path) -> dict[str, str]:
    """`bos_token`, `eos_token` and so on of a tokenizer, as transformers finds them in `folder`:
    special_tokens_map.json overrides a tokenizer_config.json without `added_tokens_decoder`. Raises
    CorpusError."""
    config = read_object(folder / CONFIG)
    files = [config, read_object(folder / SPECIAL)]
    if "added_tokens_decoder" in config:
        files.reverse()
    tokens = {}
    for key, value in (item for fields in files for item in fields.items()):
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            tokens[key] = content
    return tokens


def chat_templates(folder: Path) -> dict[str, str]:
    """Chat templates of a tokenizer by name, as transformers finds them in `folder`: files, or else
    those in tokenizer_config.json. Raises CorpusError."""
    files = {DEFAULT: folder / TEMPLATE, **{file.stem: file for file in folder.glob(TEMPLATES)}}
    if found := {name: read_template(file) for name, file in files.items() if file.is_file()}:
        return found
    template = read_object(folder / CONFIG).get("chat_template")
    if isinstance(template, list):
        return {named["name"]: named["template"] for named in template}
    return {DEFAULT: template} if isinstance(template, str) else {}


def read_template(file: Path) -> str:
    """A chat template in a file. Raises CorpusError."""
    try:
        return read_small(file).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"can't read {file}: {error}") from error


def context_of_model(folder: Path) -> int | None:
    """Context length of a model, by the files beside its tokenizer, but at most LONGEST, the
    default of a run that begins from it; None: unknown. Raises CorpusError."""
    figures = (
        read_object(folder / CONFIG).get("model_max_length"),
        read_object(folder / "config.json").get("max_position_embeddings"),
    )
    lengths = [
        int(figure)
        for figure in figures
        if isinstance(figure, int | float) and 0 < figure < UNBOUNDED
    ]
    return min(*lengths, LONGEST) if lengths else None


def describe_special_tokens(tokenizer: Tokenizer) -> str:
    """A tokenizer's first special tokens, in words."""
    added = tokenizer.get_added_tokens_decoder().values()
    names = [token.content for token in added if token.special]
    return f"its special tokens are {', '.join(names[:8]) or 'none'}"


def write_tokenizer(
    source: Path,
    out: Path,
    end: int,
    begin: tuple[int, ...] | None = None,
    template: str | None = None,
    **defaults: Any,
) -> None:
    """Write the tokenizer.json `source`, and the files beside it, to the folder `out`, with these
    bounds, which transformers reads, too. `begin`: None for those of `source`; `template`: the chat
    template, if not those beside `source`. tokenizer_config.json in `out` keeps its fields, but
    for special tokens; `defaults` fill missing ones. Raises CorpusError, OSError."""
    tokenizer, folder = load_tokenizer(source), source.absolute().parent
    before, behind = added_tokens(tokenizer)
    begin = before if begin is None else begin
    if (before, behind) in ((begin, ()), (begin, (end,))):
        shutil.copyfile(source, out / TOKENIZER)
    else:
        _set_bounds(tokenizer, begin, (end,) if behind else ())
        tokenizer.save(str(out / TOKENIZER))
    named = special_tokens(out) | special_tokens(folder)
    named["eos_token"] = str(tokenizer.id_to_token(end))
    if begin:
        named.setdefault("bos_token", str(tokenizer.id_to_token(begin[0])))
    config = PLAIN | defaults | read_object(folder / CONFIG) | read_object(out / CONFIG) | named
    templates = chat_templates(folder) if template is None else {}
    if template is not None:
        (out / TEMPLATE).write_text(template, encoding="utf-8")
    elif len(templates) > 1:
        config["chat_template"] = [{"name": n, "template": t} for n, t in templates.items()]
        (out / TEMPLATE).unlink(missing_ok=True)  # it would override them
    elif (folder / TEMPLATE).is_file():
        shutil.copyfile(folder / TEMPLATE, out / TEMPLATE)
    if of_class := REBUILT.get(str(config["tokenizer_class"]).removesuffix("Fast")):
        config = of_class | config | {"tokenizer_class": PLAIN["tokenizer_class"]}
    config.pop("auto_map", None)  # it names code that isn't here
    (out / SPECIAL).unlink(missing_ok=True)  # it would override the config below
    written = json.dumps(config, indent=2, ensure_ascii=False)
    (out / CONFIG).write_text(written + "\n", encoding="utf-8")


def read_part(folders: Iterable[Path], name: object, first: object) -> bytes:
    """Bytes of a tokenizer's file (SHARED) from `first` on, in the first of the folders that has
    it. At its end fewer than PART, none without such a file. Raises CorpusError."""
    if name not in SHARED or type(first) is not int or first < 0:
        raise CorpusError(f"{name!r:.40} from {first!r:.40} on is no part of a file that is given")
    file = next((path for folder in folders if (path := folder / str(name)).is_file()), None)
    if file is None:
        return b""
    try:
        with file.open("rb") as data:
            data.seek(first)
            return data.read(PART)
    except OSError as error:
        raise CorpusError(f"can't read {name}: {error.strerror}") from error


def same_tokenizer(file: Path, other: Path) -> bool:
    """Whether two tokenizer.json give the same tokens for a text. Format, truncation, padding,
    decoder and bounds don't matter: `--bos` may have changed the bounds. Raises CorpusError."""
    if file_checksum(file) == file_checksum(other):
        return True
    try:
        return _deciding_fields(file) == _deciding_fields(other)
    except ModuleNotFoundError:  # a registry's image has no tokenizers; nodes check again
        return True


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when the file is missing. Raises CorpusError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CorpusError(f"can't read {file}: {error}") from error
    return content if isinstance(content, dict) else {}


def _deciding_fields(file: Path) -> list[Any]:
    """The parts of a tokenizer.json that decide the tokens of a text, normalized by the tokenizers
    library. Raises CorpusError."""
    fields = json.loads(load_tokenizer(file).to_str())
    return [fields[key] for key in DECIDING]


def _set_bounds(tokenizer: Tokenizer, *around: tuple[int, ...]) -> None:
    """Set the tokens before and behind each text in a tokenizer, by its post-processor."""
    from tokenizers.processors import TemplateProcessing

    before, behind = ([tokenizer.id_to_token(token) for token in tokens] for tokens in around)
    numbers = dict(zip([*before, *behind], chain(*around), strict=True))
    tokenizer.post_processor = TemplateProcessing(
        single=[*before, "$A", *behind], special_tokens=list(numbers.items())
    )


def _named_token(
    tokenizer: Tokenizer, folder: Path, named: dict[str, str], kind: str
) -> int | None:
    """The bos or eos token that the files name; None: unnamed. Raises CorpusError."""
    token = named.get(f"{kind}_token")
    if token is None:  # the model's config may name it
        number = read_object(folder / "config.json").get(f"{kind}_token_id")
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int) and 0 <= number < 1 << 32 and tokenizer.id_to_token(number):
            return number
        return None
    number = tokenizer.token_to_id(token)
    if number is None:
        raise CorpusError(
            f"{folder} names {token} as {kind}_token, but its {TOKENIZER} has no such token: "
            f"{describe_special_tokens(tokenizer)}"
        )
    return int(number)
