"""The results of an evaluation, for the plots."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cdlm.eval.report.rows import control_label, display_name, read_sections, unconditional_rows


def result_sections(directories: Sequence[Path]) -> list[dict[str, Any]]:
    """Scored unconditional samples, by judge."""
    found, _ = read_sections(directories)
    return [
        {
            "judge": section.judge,
            "protocol": section.protocol,
            "length": section.length,
            "rows": [
                {
                    "model": display_name(row),
                    "steps": row["sampling"]["steps"],
                    "control": control_label(row),
                    "precision": row["sampling"]["precision"],
                    **{key: row[key] for key in ("ppl", "ppl_interval", "entropy", "nfe", "num_samples")},
                }
                for row in unconditional_rows(section.rows)
            ],
        }
        for section in found
    ]
