"""What tests of several kernel stages share."""

import pytest
from tpu_collectives.interpreter import quicken_interpreter

quicken_interpreter()


@pytest.fixture
def faults(capfd):
    """Runs something and says what the interpreter found, however it says so."""

    def found(run):
        try:
            run()
        except Exception as error:
            if "race" not in str(error).lower():
                raise
            return {"race"}
        printed = "".join(capfd.readouterr())
        marks = {"race": "RACE DETECTED", "semaphore": "non-zero count"}
        return {name for name, mark in marks.items() if mark in printed}

    return found
