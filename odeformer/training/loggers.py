"""`metrics.csv` at the top of the run folder: one row for each step at which something was logged."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from odeformer.files import replacing

METRICS_FILE = "metrics.csv"


class MetricsFile(Logger):
    """A CSV logger that continues its file. (Lightning's CSVLogger deletes the file that it finds when a run is resumed.)

    Args:
        path: the CSV file.
        columns: names expected after "step", in this order; others are appended as they come.
        first_step: rows of later steps are dropped from an existing file, since the run repeats them.
    """

    def __init__(self, path: Path | str, columns: Sequence[str], first_step: int = 0) -> None:
        super().__init__()
        self.path = Path(path)
        self.columns = ["step", *columns]
        self.first_step = first_step
        self._row: dict[str, Any] = {}
        self._row_start = 0
        self._file: TextIO | None = None
        self._rows = self._earlier()

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run's config is in config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Adds to the row of `step`, which is on disk when this returns."""
        file = self._file or self._open()
        new = [name for name in metrics if name not in self.columns]
        if new:
            file = self._widen(new)
        if self._row.get("step") != step:
            self._row = {"step": step}
            self._row_start = file.tell()
        self._row |= {name: float(value) for name, value in metrics.items()}
        file.seek(self._row_start)
        file.truncate()
        csv.DictWriter(file, self.columns, lineterminator="\n").writerow(self._row)
        file.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> TextIO:
        # The row of the step that the run is at may still grow.
        if self._rows and int(self._rows[-1]["step"]) == self.first_step:
            latest = self._rows.pop()
            self._row = {name: float(text) for name, text in latest.items() if text and name != "step"}
            self._row["step"] = self.first_step
        return self._rewrite(self._rows)

    def _earlier(self) -> list[dict[str, str]]:
        """The rows to keep of an existing file. Raises ValueError naming a file that is damaged."""
        if not self.path.exists():
            return []
        try:
            with open(self.path, encoding="utf-8", newline="") as file:
                reader = csv.DictReader(file, strict=True)
                rows = list(reader)
            for number, row in enumerate(rows, start=2):
                if None in row or None in row.values():
                    raise ValueError(f"row {number} has another number of fields than the header")
                for text in row.values():
                    float(text or 0)
            kept = [row for row in rows if int(row["step"]) <= self.first_step]
        except (KeyError, ValueError, csv.Error) as error:
            reason = f"no column {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{self.path} is damaged: {reason}") from error
        self.columns += [name for name in reader.fieldnames or () if name not in self.columns]
        return kept

    def _widen(self, new: Sequence[str]) -> TextIO:
        self.finalize("")
        with open(self.path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        self.columns += new
        if self._row:
            rows = rows[:-1]
        return self._rewrite(rows)

    def _rewrite(self, rows: Sequence[Mapping[str, Any]]) -> TextIO:
        with replacing(self.path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        self._file = open(self.path, "r+", encoding="utf-8", newline="")  # noqa: SIM115 - open for the whole run
        self._file.seek(0, 2)
        self._row_start = self._file.tell()
        if self._row:
            csv.DictWriter(self._file, self.columns, lineterminator="\n").writerow(self._row)
        return self._file
