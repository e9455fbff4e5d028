"""Turn tables of the R packages mlbench and kernlab, as Debian ships them, into files that Esper's exam reads.

    pip install pyreadr
    apt-get download r-cran-mlbench r-cran-kernlab && for f in *.deb; do dpkg-deb -x $f FOLDER; done
    python benchmarks/uci_tables.py FOLDER

Files are written to the folder `tables` in that of the data (ESPER_DATA). Rows with missing values are dropped, and
categories become numbers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from esper.data.task import default_folder

TABLES = {
    "letter": ("LetterRecognition", "lettr"),
    "satellite": ("Satellite", "classes"),
    "vehicle": ("Vehicle", "Class"),
    "pima": ("PimaIndiansDiabetes", "diabetes"),
    "ionosphere": ("Ionosphere", "Class"),
    "income": ("income", "INCOME"),
    "dna": ("DNA", "Class"),
    "spam": ("spam", "type"),
    "vowel": ("Vowel", "Class"),
    "shuttle": ("Shuttle", "Class"),
    "musk": ("musk", "Class"),
    "soybean": ("Soybean", "Class"),
}
"""By name: the R object, and the column of its classes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="the unpacked Debian packages")
    folder = default_folder() / "tables"
    folder.mkdir(parents=True, exist_ok=True)
    packages = parser.parse_args().folder
    import pyreadr

    for name, (table, target) in TABLES.items():
        (file,) = packages.rglob(f"{table}.rda")
        frame = pyreadr.read_r(str(file))[table].dropna()
        y = frame.pop(target).astype(str).to_numpy()
        columns = [_numbers(frame[column]) for column in frame.columns]
        x = np.stack([column for column in columns if column.std() > 0], axis=1)
        np.savez_compressed(
            folder / f"{name}.npz", x=x, y=np.unique(y, return_inverse=True)[1]
        )
        print(
            f"{name}: {x.shape[0]} rows of {x.shape[1]} columns, {len(set(y))} classes"
        )


def _numbers(column: object) -> np.ndarray:
    try:
        return column.astype(float).to_numpy()
    except (TypeError, ValueError):
        return column.astype("category").cat.codes.to_numpy(dtype=float)


if __name__ == "__main__":
    main()
