"""What a process wrote on stderr, less what TensorFlow itself writes there while it is imported."""

from __future__ import annotations

import re

# Newer TensorFlows log through absl, which prints what comes before its start, of oneDNN and of CUDA, at any
# TF_CPP_MIN_LOG_LEVEL. To silence it is to silence what users log later.
_STARTUP = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR\n"
    r"|[IWE]\d{4} [\d:.]+ +\d+ (port|cudart_stub|cuda_\w+|computation_placer)\.cc:\d+\] .*\n"
)


def own_lines(stderr: str) -> str:
    """Return the lines that TensorFlow's start didn't write."""
    return _STARTUP.sub("", stderr)
