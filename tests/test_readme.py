"""The README's Python runs as it is printed, only shorter."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_lightning_example_runs(tmp_path, monkeypatch, capsys) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert "max_steps=5_000" in code
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(code.replace("max_steps=5_000", "max_steps=100"), str(README), "exec"), names)
    assert names["trainer"].global_step == 100
    assert "eval/return" in capsys.readouterr().out
