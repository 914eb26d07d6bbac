"""The README's example runs and prints what it promises."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_example_of_the_readme_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(compile(example, str(README), "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("69 KDA layers, 24 MLA layers\n")
    assert "104.189" in printed
    assert 'CallArguments(index=0, text=\'{"zone":"Rome"}\')' in printed
