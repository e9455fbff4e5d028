"""Runs the commands of the pages in benchmarks/results again, one after the other, and keeps what they print.

    python benchmarks/record_results.py [PAGE ...] [--list] [--out build/results]

The commands are the indented lines of each page. The output of each is kept in OUT/PAGE/, with its exit status and the
command; one that has succeeded is not run again, so that an interrupted recording continues. Files that a command
writes are written where it says. The numbers of a page are then brought up to date from there, by whoever recorded.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
COMMAND = re.compile(
    r"^(?: {4}|\$ )((?:[A-Z_]+=\S+ )*(?:esper|esper-bench|python|pytest|make) .+)$",
    re.MULTILINE,
)


def commands(page: Path) -> list[str]:
    """Returns the commands of a page in order, each once, without the comments behind them."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    return list(
        dict.fromkeys(
            re.sub(r"\s+#.*$", "", " ".join(line.split()))
            for line in COMMAND.findall(text)
        )
    )


def pages(names: list[str]) -> list[Path]:
    """Returns the pages called ``names``, all of them without names. Raises SystemExit for an unknown one."""
    known = {
        path.stem: path
        for path in sorted(RESULTS.iterdir())
        if path.suffix in (".md", ".txt")
    }
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(
            f"unknown page {', '.join(unknown)}; known: {', '.join(known)}"
        )
    return [known[name] for name in names or known]


def record(command: str, folder: Path) -> bool:
    """Runs a command unless it has succeeded before; returns whether it has succeeded."""
    stem = folder / hashlib.sha256(command.encode()).hexdigest()[:12]
    done, log = stem.with_suffix(".done"), stem.with_suffix(".log")
    if any(folder.parent.glob(f"*/{done.name}")):  # of this page or of another one
        print(f"done before: {command}", flush=True)
        return True
    for name in re.findall(r"--out (runs/\S+)", command) if log.exists() else ():
        shutil.rmtree(
            ROOT / name, ignore_errors=True
        )  # an interrupted attempt's, which the command would refuse
    print(f"$ {command}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as file:
        file.write(f"$ {command}\n")
        file.flush()
        status = subprocess.run(
            ["bash", "-c", command], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT
        ).returncode
        file.write(f"exit status {status}\n")
    if status:
        print(f"FAILED with {status}: {command}; see {log}", flush=True)
        return False
    done.touch()
    return True


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Runs the commands of recorded results again."
    )
    parser.add_argument(
        "pages",
        nargs="*",
        metavar="PAGE",
        help="names without the suffix; all by default",
    )
    parser.add_argument("--list", action="store_true", help="only print the commands")
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "build" / "results",
        help="folder of the outputs",
    )
    options = parser.parse_args()
    failed = False
    for page in pages(options.pages):
        for command in commands(page):
            if options.list:
                print(f"{page.stem}: {command}")
            elif not record(command, options.out / page.stem):
                failed = True
    sys.exit(failed)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on where this one stopped")
