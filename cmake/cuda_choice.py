"""Decides whether the CUDA kernels are compiled: for setup.py and set-up (tools/dev/machine.py).

nvcc takes many minutes, so it runs only where a GPU can use the result, or where `GMETA_CUDA=ON` asks for it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

CHOICES = ("AUTO", "ON", "OFF")


def cuda_choice(root: Path = Path("/")) -> str:
    """Return the value of CMake's GMETA_CUDA.

    Args:
      root: The folder that holds dev and proc.

    Returns:
      The environment variable GMETA_CUDA, AUTO if it is unset; for AUTO on a machine without a GPU, OFF.

    Raises:
      ValueError: The variable is none of AUTO, ON and OFF.
    """
    asked = os.environ.get("GMETA_CUDA") or "AUTO"
    choice = asked.upper()
    if choice not in CHOICES:
        raise ValueError(f"GMETA_CUDA={asked} is none of {', '.join(CHOICES)}")
    return "OFF" if choice == "AUTO" and not has_gpu(root) else choice


def has_gpu(root: Path = Path("/")) -> bool:
    """Whether this machine has an NVIDIA GPU with a driver.

    Its device file says so, or in some containers only the driver's list of GPUs or nvidia-smi.
    """
    if any((root / "dev").glob("nvidia[0-9]*")) or any((root / "proc/driver/nvidia/gpus").glob("*")):
        return True
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    done = subprocess.run(
        [program, "-L"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    return done.returncode == 0 and done.stdout.startswith("GPU ")
