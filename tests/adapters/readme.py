"""The Python examples of adapters/README.md."""

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

README = Path(__file__).parents[2] / "adapters" / "README.md"
EXAMPLE_TIMEOUT_S = 240
FRAGMENTS = (
    "From SageMaker HyperPod",
    "How adapters reach the bytes",
    "PyTorch: torch.distributed.checkpoint",
    "The unmodified SageMaker package",
    "Which checkpoint a restart takes",
)
"""What is under these headings are lines of a program, and no whole one."""


def examples() -> dict[str, str]:
    """The code of each example by its heading, with a number where there are several."""
    found: dict[str, list[str]] = {}
    heading = ""
    for title, code in re.findall(
        r"^#+ ([^\n]+)$|^```python\n(.*?)^```$|^```(?:.*?)^```$", README.read_text(), re.M | re.S
    ):
        if code:
            found.setdefault(heading, []).append(code)
        heading = title or heading
    return {
        name if len(codes) == 1 else f"{name} {number}": code
        for name, codes in found.items()
        if name not in FRAGMENTS
        for number, code in enumerate(codes, 1)
    }


def run(heading: str, folder: Path, environment: Mapping[str, str], before: str = "") -> None:
    """Run an example as it stands, in a process of its own that does something `before` it."""
    done = subprocess.run(
        [sys.executable, "-c", before + examples()[heading]],
        cwd=folder,
        env={**environment, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=EXAMPLE_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
