#!/bin/sh
# docs/fine-tune-a-chat-model.md from end to end. If there is a folder out/smollm, nothing is downloaded.
set -eu
cd "$(dirname "$0")/../.."

test -d out/smollm || hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir out/smollm
python examples/chat/shop.py out/shop.jsonl
planaria data prepare out/shop.jsonl --out data/shop --tokenizer out/smollm --validation 0.1
planaria up examples/chat/shop.toml --kill 2@15 --out out/shop
planaria export out/shop --merged --out out/my-shop
python examples/chat/ask.py out/smollm out/my-shop | tee out/answers.md
