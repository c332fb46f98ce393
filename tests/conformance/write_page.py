"""Writes the table of stratagem/capabilities.py into docs/strategies.md."""

from __future__ import annotations

from pathlib import Path

from stratagem import capabilities

PAGE = Path(__file__).parents[2] / "docs" / "strategies.md"

if __name__ == "__main__":
    rows = capabilities.page()
    before, _, rest = PAGE.read_text().partition(rows[0])
    after = rest.partition("\n\n")[2]
    PAGE.write_text("\n".join([before + rows[0], *rows[1:]]) + "\n\n" + after)
