"""The README's harness, as it stands there, against a real deployment: whoever copies it must see it work."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from tests.e2e.live import live

pytestmark = pytest.mark.integration

README = Path(__file__).resolve().parents[2] / "README.md"


async def test_the_harness_of_the_readme_reports_until_a_release_is_served(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert code.count("\n") <= 20
    async with live(tmp_path, traffic=False) as found:
        code = code.replace("http://127.0.0.1:8900", found.running.url).replace("range(100)", "range(16)")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, err.decode()
        assert re.fullmatch(r"now serving [0-9a-f]{16}:[1-9]\d*\n", out.decode())
        audit = await found.audit()
    assert [v.text for v in audit.violations] == [] and audit.records == 256
