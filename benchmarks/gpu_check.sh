#!/usr/bin/env bash
# Everything of Esper that only a GPU can show, in under ten minutes on a machine with torch and nvcc: builds, runs the
# CUDA tests, looks for races and wild accesses with compute-sanitizer, measures, and grows hosts on the GPU.
#
#   benchmarks/gpu_check.sh [FOLDER]       FOLDER (default: gpu_check) gets summary.json, summary.md, what was measured and logs
#
# A step that cannot be done here is skipped with the reason. Each step has a limit, and all of them together another: a
# step for which no time is left has failed. The exit code is 1 if a step failed.
set -uo pipefail

cd "$(dirname "$0")/.."
folder=${1:-gpu_check}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
: > "$folder/steps.tsv"
failed=0
budget=570  # seconds for all steps

note() {  # $1: step, $2: ok, failed or skipped, $3: seconds, $4: what to say
    printf '%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "$4" >> "$folder/steps.tsv"
    printf '%-12s %-8s %5s s  %s\n' "$1" "$2" "$3" "$4"
}

step() {  # $1: name, $2: seconds allowed, then the command; its last line is what the summary says
    local name=$1 limit=$2 start=$SECONDS left=$((budget - SECONDS)) status=0
    shift 2
    if [ "$left" -lt 5 ]; then
        failed=1
        note "$name" failed 0 "no time left of $budget s"
        return
    fi
    [ "$limit" -gt "$left" ] && limit=$left
    timeout --kill-after=5 "$limit" "$@" > "$folder/$name.log" 2>&1 || status=$?
    local last
    last=$(tail -n 1 "$folder/$name.log" | tr '\t' ' ' | cut -c1-160)
    if [ "$status" = 0 ]; then
        note "$name" ok $((SECONDS - start)) "$last"
    else
        failed=1
        [ "$status" = 124 ] || [ "$status" = 137 ] && last="not done after $limit s"
        note "$name" failed $((SECONDS - start)) "$last"
    fi
}

reason=$(python - <<'PYTHON'
import shutil

try:
    import torch
except ImportError:
    print("torch is not installed")
else:
    if not torch.cuda.is_available():
        print("no GPU that torch can use")
    elif shutil.which("nvcc") is None:
        print("no nvcc")
PYTHON
)

# $1: tool. A few small cases of each operator, and of captured hosts in training: under the sanitizer a kernel is some
# hundred times slower.
sanitized() {
    compute-sanitizer --tool "$1" --error-exitcode 1 --launch-timeout 0 \
        python -m pytest -q -p no:cacheprovider tests/cuda -m cuda \
        -k "sizes_around or same_bits_every_time or tokens or more_tensors or a_few_captured_epochs"
}

measure() {  # $1: name, $2: seconds allowed, then cases and options: a few turns of each on the GPU
    local name=$1 limit=$2
    shift 2
    step "$name" "$limit" esper-bench "$@" --device cuda --rounds 5 --seconds 5 \
        --json "$folder/$name.json" --markdown "$folder/$name.md"
}

if [ -n "$reason" ]; then
    for name in build tests bench epochs rounds run racecheck memcheck; do note "$name" skipped 0 "$reason"; done
else
    export ESPER_CUDA=1 ESPER_REQUIRE_NATIVE=1
    step build 240 python -m pip install --quiet --no-build-isolation --no-deps -e .
    step tests 240 python -m pytest -q -p no:cacheprovider tests/cuda
    measure bench 60 cross-entropy grad-stats norm-relu-pool sgd stage-batch
    measure epochs 150 train-epoch validate env-step
    measure rounds 60 telemetry-overhead end-to-end --size 2x10
    step run 60 esper run --device cuda --controller schedule --rounds 1 --out "$folder/run"
    if command -v compute-sanitizer > /dev/null; then
        export -f sanitized
        step racecheck 120 bash -c "sanitized racecheck"
        step memcheck 120 bash -c "sanitized memcheck"
    else
        for name in racecheck memcheck; do note "$name" skipped 0 "no compute-sanitizer"; done
    fi
fi

python - "$folder" <<'PYTHON'
import json
import sys
from pathlib import Path

folder = Path(sys.argv[1])
rows = [line.split("\t") for line in (folder / "steps.tsv").read_text().splitlines()]
steps = [{"step": n, "status": s, "seconds": int(t), "says": said} for n, s, t, said in rows]
try:
    from esper.files.system_info import summary_lines

    machine = summary_lines(paths=False)
except ImportError as error:
    machine = [f"esper cannot be imported here: {error}"]
MEASURED = ("bench", "epochs", "rounds")
bench = [row for name in MEASURED if (file := folder / f"{name}.json").is_file() for row in json.loads(file.read_text())]
(folder / "summary.json").write_text(json.dumps({"machine": machine, "steps": steps, "bench": bench}, indent=2) + "\n")
table = ["| step | status | seconds | |", "|---|---|---|---|"]
table += [f"| {x['step']} | {x['status']} | {x['seconds']} | {x['says']} |" for x in steps]
page = ["# What a GPU shows", "", *(f"    {line}" for line in machine), "", *table, ""]
page += [file.read_text() for name in MEASURED if (file := folder / f"{name}.md").is_file()]
(folder / "summary.md").write_text("\n".join(page))
PYTHON
rm "$folder/steps.tsv"
echo "$folder/summary.md"
exit "$failed"
