"""The page on the simulator is true: its Python runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sim
PAGE = Path(__file__).parents[2] / "docs" / "simulator.md"


def test_the_blocks_of_the_page_run_from_top_to_bottom() -> None:
    blocks = re.findall(r"^```python sim\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    done = subprocess.run([sys.executable, "-c", "\n".join(blocks)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "read after write" in done.stdout
