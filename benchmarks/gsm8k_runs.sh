#!/usr/bin/env bash
# The runs of docs/gsm8k.md on one GPU, several at a time under CUDA MPS; their seconds then mean nothing.
#   benchmarks/gsm8k_runs.sh MODEL DATA FOLDER NAME[:STEPS] [NAME[:STEPS] ..]
# MODEL: as `model.path`. DATA: a folder with train.jsonl and test.jsonl of GSM8K. NAME: seed-0, seed-1, seed-2,
# pressure (seed 0 within 4 GiB), lora, lora-float8, lora-int4, or one of the latter with another seed, such as
# lora-int4-seed-1. STEPS: of those of the recipe, after which the run is stopped (and ends with 130). Each ends in
# FOLDER/NAME; FOLDER/ended has exit codes.
# Steps, and other settings for all runs, in SETTINGS: SETTINGS="train.steps=60" benchmarks/gsm8k_runs.sh ...
set -u
model=${1:?MODEL} data=${2:?DATA} folder=${3:?FOLDER}; shift 3
mkdir -p "$folder"
export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps-log
nvidia-cuda-mps-control -d 2> /dev/null
for given in "$@"; do
  name=${given%%:*} stop=${given#"$name"}
  kind=${name%-seed-*} seed=0
  if [ "$kind" != "$name" ]; then seed=${name##*-seed-}; fi
  lora="model.lora.rank=32 optimizer.lr=6e-5 memory.budget_gib=24 seed=$seed"
  case $kind in
    seed-*) own="seed=${name#seed-} memory.budget_gib=21" ;;
    pressure) own="seed=0 memory.budget_gib=4" ;;
    lora) own="$lora" ;;
    lora-*) own="$lora model.base=${kind#lora-}" ;;
    *) echo "$name: seed-N, pressure, lora, lora-float8 or lora-int4, or one of the latter with -seed-N" >&2; exit 2 ;;
  esac
  # Chunks of the head as small as the budget of 4 GiB needs them. With SETTINGS="deterministic=true" all runs of a seed
  # then have the same bits; without, the backward of attention adds in any order.
  (
    # shellcheck disable=SC2086
    python -m ebbtide.cli train gsm8k run.folder="$folder/$name" model.path="$model" task.file.train="$data/train.jsonl" \
      task.file.held_out="$data/test.jsonl" evaluate.problems=1319 evaluate.final=null train.head_chunk_tokens=256 \
      checkpoint=null report.rollouts=false $own ${SETTINGS:-} > "$folder/$name.log" 2>&1 &
    if [ -n "$stop" ]; then
      until grep -qs "\"step\": ${stop#:}," "$folder/$name/metrics.jsonl" || ! kill -0 $! 2> /dev/null; do sleep 0.2; done
      kill -TERM $! 2> /dev/null
    fi
    wait $!
    echo "$name $?" >> "$folder/ended"
  ) &
done
wait
cat "$folder/ended"
