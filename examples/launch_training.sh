#!/bin/bash
# Train a drafter for a target of your own, with several processes of one machine.
#
#     TARGET=Qwen/Qwen3-0.6B PROMPTS=prompts.jsonl examples/launch_training.sh --bf16 true --num_train_epochs 6
#
# All arguments go to `hf-domino train`. Killed, it goes on when the same command is given again.
# OUT names the folder of the drafter, MAX_NEW_TOKENS the room for each answer, PROCESSES how many there are: one for each
# GPU. Without a GPU add --use_cpu true.
set -euo pipefail

: "${TARGET:?must be a folder or a model on the Hub}"
: "${PROMPTS:?must be a JSONL or Parquet file, or a data set on the Hub}"
OUT=${OUT:-drafter}

python -m hf_domino.cli regenerate --target "$TARGET" --prompts "$PROMPTS" --out "$OUT-answers" \
    --max_new_tokens "${MAX_NEW_TOKENS:-512}"

accelerate launch --multi_gpu --num_machines 1 --num_processes "${PROCESSES:-2}" \
    --mixed_precision no --dynamo_backend no \
    -m hf_domino.cli train --target "$TARGET" --data "$OUT-answers" --out "$OUT" \
    --from_target --cache_features "$OUT-features" "$@"
