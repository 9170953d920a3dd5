"""Tokens per second of `planaria data prepare`, over those of `datasets.map`.

Both read the same JSON lines and write tokens to disk, in turns, with the same tokenizer and as
many processes as processors. `datasets` first reads the lines into Arrow, which is counted, and
stores lists of int64.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final

from planaria_lab.bench.rows import keep

FILES: Final = 8
DOCUMENTS: Final = 200
"""Documents in each file; they are some pages long."""
ROUNDS: Final = 3


def main() -> None:
    available = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_texts(folder)
        print("processors | planaria, tokens/s | datasets.map | ratio")
        for cores in sorted({1, 2, len(available)} & set(range(1, len(available) + 1))):
            rates = [
                tuple(
                    _rate(prepare_by, folder, available[:cores])
                    for prepare_by in (_planaria, _datasets)
                )
                for _ in range(ROUNDS)
            ]
            ratio = median(ours / theirs for ours, theirs in rates)
            ours, theirs = (median(rate) for rate in zip(*rates, strict=True))
            print(f"{cores:10} | {ours:18,.0f} | {theirs:12,.0f} | {ratio:.2f}", flush=True)
            keep("preparing", processors=cores, planaria=ours, datasets=theirs, ratio=ratio)
    print("goal: 1.0 or more")


def _write_texts(folder: Path) -> None:
    """Write files that repeat the corpus's documents, and a tokenizer made from these."""
    from planaria.node.data.prepare import prepare
    from planaria.node.data.recipe import Recipe
    from planaria.node.launch.resolve import SHIPPED

    recipe = Recipe([str(SHIPPED.parent)])
    prepare(recipe, folder / "prepared")
    texts = cycle([text for file in recipe.files().files for text in recipe.documents(file)])
    (folder / "texts").mkdir()
    for number in range(FILES):
        lines = [json.dumps({"text": text}) + "\n" for text in islice(texts, DOCUMENTS)]
        (folder / "texts" / f"{number:02d}.jsonl").write_text("".join(lines))


def _rate(prepare_by: Any, folder: Path, processors: list[int]) -> float:
    """Return the tokens/s of a process on these processors."""
    answers = multiprocessing.get_context("spawn").Queue()
    process = multiprocessing.get_context("spawn").Process(
        target=_timed, args=(prepare_by, folder, processors, answers)
    )
    process.start()
    rate = float(answers.get(timeout=600))
    process.join()
    return rate


def _timed(prepare_by: Any, folder: Path, processors: list[int], answers: Any) -> None:
    os.sched_setaffinity(0, processors)
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    out = folder / "out"
    begun = perf_counter()
    tokens = prepare_by(folder, out, len(processors))
    answers.put(tokens / (perf_counter() - begun))
    shutil.rmtree(out)


def _planaria(folder: Path, out: Path, jobs: int) -> int:
    from planaria.node.data.executors import spreading
    from planaria.node.data.prepare import prepare
    from planaria.node.data.recipe import Recipe

    recipe = Recipe([str(folder / "texts")], tokenizer=folder / "prepared" / "tokenizer.json")
    with spreading(jobs, None) as spread:
        corpus, _ = prepare(recipe, out, spread=spread)
    return sum(split.tokens for split in corpus.index.splits.values())


def _datasets(folder: Path, out: Path, jobs: int) -> int:
    import datasets
    from tokenizers import Tokenizer

    os.environ["RAYON_NUM_THREADS"] = "1"
    tokenizer = Tokenizer.from_file(str(folder / "prepared" / "tokenizer.json"))
    files = [str(file) for file in sorted((folder / "texts").iterdir())]
    texts = datasets.load_dataset(
        "json", data_files=files, split="train", cache_dir=str(out / "cache"), num_proc=jobs
    )
    tokens = texts.map(
        _tokens_of,
        batched=True,
        num_proc=jobs,
        remove_columns=["text"],
        fn_kwargs={"tokenizer": tokenizer},
    )
    return sum(tokens["count"])


def _tokens_of(batch: dict[str, list[str]], tokenizer: Any) -> dict[str, list[Any]]:
    encodings = tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
    ids = [encoding.ids for encoding in encodings]
    return {
        "ids": ids,
        "count": [len(document) + 1 for document in ids],
    }  # one more, for the end of the document


if __name__ == "__main__":
    main()
