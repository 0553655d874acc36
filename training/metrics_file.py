"""The file metrics.csv in the folder of a run."""

import csv
from io import StringIO
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from data.atomic_file import replacing
from training._compat import KeepingWriter


class MetricsFile(CSVLogger):
    """A CSVLogger that appends to the existing file when a run is resumed in its folder."""

    @property
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        if self._experiment is None:
            self._experiment = KeepingWriter(self.log_dir)
        return self._experiment

    @rank_zero_only
    def begin_at(self, step: int) -> None:
        """Delete an incomplete last row and all rows from `step` on, which will be logged again."""
        file = Path(self.experiment.metrics_file_path)
        if not file.exists():
            return
        lines = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        reader = csv.DictReader(lines)
        rows = [row for row in reader if int(row["step"]) < step]
        if not rows:
            file.unlink()
            return
        text = StringIO(newline="")
        writer = csv.DictWriter(text, reader.fieldnames)
        writer.writeheader()
        writer.writerows(rows)
        with replacing(file) as new:
            new.write(text.getvalue().encode())
        self.experiment.metrics_keys = list(reader.fieldnames)
