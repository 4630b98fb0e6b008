"""Sessions of their own for Triton: in its interpreter, and to compile for a GPU that is not there."""

import os
import subprocess
import sys
from pathlib import Path


def in_another_process(*arguments, **environment):
    """Run Python with warnings as errors and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        env={**os.environ, **environment},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_passes_interpreted(file, chosen):
    """Run the tests of a file that are so named in Triton's interpreter; none may be skipped."""
    options = ["-q", "--tb=short", "--maxfail=5", "-p", "no:xdist", "-p", "no:cacheprovider", "-k", chosen]
    said = in_another_process("-m", "pytest", file, *options, TRITON_INTERPRET="1")
    assert "passed" in said, said
    assert "skipped" not in said, said
