"""A Spark session with checks for Java, the right Python for workers, and one-line errors."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gmeta.core import errors
from gmeta.core.errors import GmetaError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CELLS = "spark.sql.execution.arrow.maxRecordsPerBatch"
FEW_CELLS = _CELLS, "16"
"""The setting for tables with cells of several megabytes: Arrow batches must stay within 2 GB each."""

_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",  # times without a zone are UTC, as in the other engines
    _CELLS: "65536",
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
}
_LOCAL = {  # a machine may be unreachable under its own name
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


@contextmanager
def spark_session(master: str | None = None, conf: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """Provide the active session, or a new one that is stopped at the end.

    Args:
      master: Where to run; None: as ``spark-submit`` or Spark's own files say, else on this machine.
      conf: More settings for a new session.

    Raises:
      GmetaError: pyspark or Java is missing, or the session can't start.
    """
    try:
        from pyspark import SparkConf
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise GmetaError(f"--engine spark needs pyspark: pip install 'gmeta[spark]' ({error})") from error
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        raise GmetaError("--engine spark needs Java 17: install it, or set JAVA_HOME")
    there = SparkSession.getActiveSession()
    spark = there
    if spark is None:
        settings = SparkConf()
        master = master or settings.get("spark.master") or "local[*]"
        own = {"spark.pyspark.python": os.environ.get("PYSPARK_PYTHON", sys.executable)}
        if master.startswith("local"):
            own = {**own, **_LOCAL}
        builder = SparkSession.builder.appName("gmeta prepare").master(master)
        for name, value in {**own, **(conf or {})}.items():
            if (conf and name in conf) or not settings.contains(name):
                builder = builder.config(name, value)
        # Executors read this path from the session; forked workers of a local session, from the environment.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        with spark_errors():
            spark = builder.getOrCreate()
        spark.sparkContext.setLogLevel("ERROR")
    before = {name: spark.conf.get(name, None) for name in _SETTINGS}
    try:
        for name, value in _SETTINGS.items():
            spark.conf.set(name, value)
        yield spark
    finally:
        if there is None:
            spark.stop()
        else:
            for name, old in before.items():
                spark.conf.unset(name) if old is None else spark.conf.set(name, old)


@contextmanager
def spark_errors() -> Iterator[None]:
    """Convert Spark's errors to gmeta's, in one line; if a worker raised an error, raise that one.

    Raises:
      GmetaError: Spark raised an error.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (Py4JError, PySparkException) as error:
        text = str(error)
        if found := re.search(r"gmeta\.core\.errors\.(\w+): (.*)", text):
            kind = getattr(errors, found[1], GmetaError)
            raise (kind if issubclass(kind, GmetaError) else GmetaError)(found[2]) from error
        if raised := re.findall(r"^(\w[\w.]*(?:Error|Exception)): (.*)$", text, re.MULTILINE):
            raise GmetaError(f"a worker of Spark: {raised[-1][0]}: {raised[-1][1]}") from error
        causes = re.findall(r"(?:Caused by: |: )(?:[\w.$]+\.)(\w+(?:Exception|Error)): ([^\n]+)", text)
        said = f"{causes[-1][0]}: {causes[-1][1]}" if causes else text.strip().splitlines()[0]
        raise GmetaError(f"Spark: {said}") from error
