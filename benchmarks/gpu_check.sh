#!/usr/bin/env bash
# Everything of Esper that only a GPU can show, in under ten minutes on a machine with torch and nvcc: builds, runs the
# CUDA tests, looks for races and wild accesses with compute-sanitizer, measures, and grows hosts on the GPU.
#
#   benchmarks/gpu_check.sh [FOLDER]       FOLDER (default: gpu_check) gets summary.json, summary.md, bench.json and logs
#
# A step that cannot be done here is skipped with the reason. The exit code is 1 if a step failed.
set -uo pipefail

cd "$(dirname "$0")/.."
folder=${1:-gpu_check}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
: > "$folder/steps.tsv"
failed=0

note() {  # $1: step, $2: ok, failed or skipped, $3: seconds, $4: what to say
    printf '%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "$4" >> "$folder/steps.tsv"
    printf '%-12s %-8s %5s s  %s\n' "$1" "$2" "$3" "$4"
}

step() {  # $1: name, $2: seconds allowed, then the command; its last line is what the summary says
    local name=$1 limit=$2 start=$SECONDS status=0
    shift 2
    timeout "$limit" "$@" > "$folder/$name.log" 2>&1 || status=$?
    local last
    last=$(tail -n 1 "$folder/$name.log" | tr '\t' ' ' | cut -c1-160)
    if [ "$status" = 0 ]; then
        note "$name" ok $((SECONDS - start)) "$last"
    else
        failed=1
        [ "$status" = 124 ] && last="not done after $limit s"
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

sanitized() {  # $1: tool. A few small cases of each operator: under the sanitizer a kernel is some hundred times slower.
    compute-sanitizer --tool "$1" --error-exitcode 1 --launch-timeout 0 \
        python -m pytest -q -p no:cacheprovider tests/cuda -m cuda \
        -k "sizes_around or same_bits_every_time or tokens or more_tensors"
}

if [ -n "$reason" ]; then
    for name in build tests racecheck memcheck bench run; do note "$name" skipped 0 "$reason"; done
else
    export ESPER_CUDA=1 ESPER_REQUIRE_NATIVE=1
    step build 240 python -m pip install --quiet --no-build-isolation --no-deps -e .
    step tests 240 python -m pytest -q -p no:cacheprovider tests/cuda
    if command -v compute-sanitizer > /dev/null; then
        export -f sanitized
        step racecheck 120 bash -c "sanitized racecheck"
        step memcheck 120 bash -c "sanitized memcheck"
    else
        for name in racecheck memcheck; do note "$name" skipped 0 "no compute-sanitizer"; done
    fi
    step bench 180 esper-bench --json "$folder/bench.json" --markdown "$folder/bench.md"
    step run 120 esper run --device cuda --controller schedule --rounds 1 --out "$folder/run"
fi

python - "$folder" <<'PYTHON'
import json
import sys
from pathlib import Path

folder = Path(sys.argv[1])
rows = [line.split("\t") for line in (folder / "steps.tsv").read_text().splitlines()]
steps = [{"step": n, "status": s, "seconds": int(t), "says": said} for n, s, t, said in rows]
try:
    from esper.experiment.environment import summary_lines

    machine = summary_lines(paths=False)
except ImportError as error:
    machine = [f"esper cannot be imported here: {error}"]
bench = json.loads((folder / "bench.json").read_text()) if (folder / "bench.json").is_file() else []
(folder / "summary.json").write_text(json.dumps({"machine": machine, "steps": steps, "bench": bench}, indent=2) + "\n")
table = ["| step | status | seconds | |", "|---|---|---|---|"]
table += [f"| {x['step']} | {x['status']} | {x['seconds']} | {x['says']} |" for x in steps]
page = ["# What a GPU shows", "", *(f"    {line}" for line in machine), "", *table, ""]
if (folder / "bench.md").is_file():
    page += [(folder / "bench.md").read_text()]
(folder / "summary.md").write_text("\n".join(page))
PYTHON
rm "$folder/steps.tsv"
echo "$folder/summary.md"
exit "$failed"
