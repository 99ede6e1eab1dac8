"""How NCCL connects this rank's GPU with others: read from its log, as it has no function that says it."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from pathlib import Path

_CHANNEL = re.compile(r"Channel \d+(?:/\d+)? ?: \d+\[\w+\] -> \d+\[\w+\](?: \[\w+\])? via (\S+)")
_NEAREST = re.compile(r"\btype (\w+)/")
_MEANING = {"LOC": "itself", "NVL": "NVLink", "NVB": "NVLink", "C2C": "NVLink C2C"}


def log_nccl() -> None:
    """Let NCCL, before it is loaded, write its log into a file, unless the user has it write elsewhere."""
    if "NCCL_DEBUG" in os.environ or "NCCL_DEBUG_FILE" in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="gmeta-nccl-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["NCCL_DEBUG"] = "INFO"
    os.environ["NCCL_DEBUG_SUBSYS"] = "INIT,GRAPH,P2P,SHM,NET"
    os.environ["NCCL_DEBUG_FILE"] = f"{folder}/%p.log"


def read_transports() -> list[str]:
    """Return the transports that this rank's NCCL has logged, such as ``P2P/CUMEM over NVLink``."""
    name = os.environ.get("NCCL_DEBUG_FILE", "").replace("%p", str(os.getpid()))
    path = Path(name)
    return parse_transports(path.read_text(errors="replace")) if name and path.is_file() else []


def parse_transports(log: str) -> list[str]:
    r"""Find the transports in NCCL's log.

    Example:
      >>> parse_transports(
      ...     "NCCL INFO Pattern 4, crossNic 0, nChannels 16, bw 20/20, type NVL/PIX, sameChannels 1\n"
      ...     "NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n"
      ...     "NCCL INFO Channel 01/0 : 0[0] -> 1[1] [send] via NET/Socket/0\n"
      ... )
      ['P2P/CUMEM over NVLink', 'NET/Socket']
    """
    links = {_MEANING.get(kind, f"PCI ({kind})") for kind in _NEAREST.findall(log)}
    found = []
    for way in _CHANNEL.findall(log):
        kind = re.sub(r"/\d+(?=/|$)", "", way)  # the number of the card
        over = f" over {', '.join(sorted(links))}" if kind.startswith("P2P") and links else ""
        found.append(kind + over)
    return list(dict.fromkeys(found))
