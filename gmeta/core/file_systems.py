"""Finds the file systems of remote addresses, and writes files there that appear whole or not at all.

pyarrow reads and writes ``s3://``, ``gs://``, ``abfs://`` and ``hdfs://``, and fsspec, if it is installed,
other schemes. `open_files` returns the `gmeta.core.files.Files` of an address or a local path::

                            LocalFiles                       StoredFiles
  a file appears whole      it is flushed, then renamed      object stores do so; in other file systems it
                                                             is written under another name, then renamed
  a folder appears whole    it is flushed, then renamed      its last file completes it: readers ignore a
                                                             folder without that file
  one writer at a time      a second is refused by a lock,   a second takes over: the first is refused at
                            which a killed process releases  its next file

Object stores have no lock that a killed process releases. The writer therefore stores a random token in
``.writer``, and reads it before each file that it writes. Between this check and the end of the write,
another writer may take over: so after a writer has lost its claim, at most one file of it still appears.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import tempfile
import urllib.parse
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gmeta.core.errors import ConfigError, GmetaError, first_line
from gmeta.core.files import LocalFiles

SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://")
PYARROW = ("abfs", "abfss", "gcs", "gs", "hdfs", "s3", "viewfs")
"""The schemes that pyarrow reads by itself."""
_OBJECT_STORES = {"abfs", "abfss", "gcs", "gs", "s3"}
_WRITER = ".writer"
_AT_ONCE = 8 << 20
_ADVICE = (
    (
        "NO_SUCH_BUCKET|bucket does not exist|NoSuchBucket|ContainerNotFound",
        "create the bucket, or correct its name",
    ),
    (
        "ACCESS_DENIED|Access ?Denied|[Pp]ermission|[Ff]orbidden|INVALID_ACCESS_KEY|SIGNATURE_DOES_NOT_MATCH",
        "use credentials that may read, write, list and delete there",
    ),
    (
        "NETWORK_CONNECTION|[Cc]onnect|resolve|[Tt]imed? ?out|REQUEST_TIMEOUT|SLOW_DOWN",
        "check the network and the endpoint",
    ),
)
"""What an error's text contains -> what to do."""


def local_path(text: str) -> Path | None:
    """Return a local path, with or without the prefix ``file://``; None for an address of another scheme.

    Raises:
      ConfigError: The address ``file://`` isn't of this machine.
    """
    found = SCHEME.match(text)
    if found is None:
        return Path(text)
    if found["scheme"].lower() != "file":
        return None
    host, slash, rest = text[found.end() :].partition("/")
    if not slash or host not in ("", "localhost"):
        raise ConfigError(f"{text}: names no file of this machine: behind file:// comes a path from / on")
    return Path(f"/{rest}")


def has_fsspec() -> bool:
    """Return whether fsspec is installed, without importing it."""
    return importlib.util.find_spec("fsspec") is not None


def lacks(scheme: str) -> str | None:
    """Return which package would read a scheme that neither pyarrow nor fsspec reads here; None if one does.

    Example:
      >>> lacks("odd")
      "pyarrow doesn't know odd://, and fsspec, which knows more, isn't installed: `pip install fsspec`"
    """
    if scheme in PYARROW:
        return None
    if not has_fsspec():
        return (
            f"pyarrow doesn't know {scheme}://, and fsspec, which knows more, isn't installed: "
            "`pip install fsspec`"
        )
    import fsspec

    try:
        fsspec.get_filesystem_class(scheme)
    except ValueError:
        return f"neither pyarrow nor fsspec knows {scheme}://"
    except ImportError as error:  # names a package that fsspec itself requires
        return f"fsspec needs a package for {scheme}://: {first_line(error)}"
    return None


@functools.cache
def file_system(scheme: str, authority: str) -> tuple[Any, str]:
    """Return the pyarrow file system of paths ``scheme://authority/...``, and their root in it."""
    from pyarrow import ArrowInvalid, fs

    root = f"{scheme}://{authority}/"
    if scheme == "s3":
        one_request = {"allow_delayed_open": "true"}  # for a small file in place of three
        try:
            found, base = fs.FileSystem.from_uri(root + _s3_options(one_request))
        except ArrowInvalid:  # pyarrow 17 doesn't know the option
            found, base = fs.FileSystem.from_uri(root + _s3_options({}))
        return found, base.rstrip("/")
    if scheme in PYARROW:
        found, base = fs.FileSystem.from_uri(root)
        return found, base.rstrip("/")
    import fsspec

    found, base = fsspec.core.url_to_fs(root)
    return fs.PyFileSystem(fs.FSSpecHandler(found)), base.rstrip("/")


def _s3_options(options: dict[str, str]) -> str:
    """Return the environment's S3 settings for pyarrow, which would request missing ones from the service."""
    options = dict(options)
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    endpoint = os.environ.get("S3_ENDPOINT")
    if endpoint:
        scheme, _, host = endpoint.rpartition("://")
        options |= {"endpoint_override": host, "scheme": scheme or "https"}
        region = region or "us-east-1"
    if region:
        options["region"] = region
    return f"?{urllib.parse.urlencode(options)}" if options else ""


def within(path: str) -> tuple[Any, str]:
    """Return an address' file system, and its name there."""
    scheme, _, rest = path.partition("://")
    authority, _, inner = rest.partition("/")
    found, base = file_system(scheme, authority)
    return found, f"{base}/{inner}"


@dataclass(frozen=True)
class StoredPath:
    """A file in a remote file system.

    Attributes:
      address: Such as ``s3://bucket/prefix/file``.
      system: The pyarrow file system.
      place: The file's name in it.
    """

    address: str
    system: Any = field(repr=False)
    place: str = field(repr=False)

    def __str__(self) -> str:
        return self.address

    __fspath__ = __str__

    @property
    def name(self) -> str:
        """The part after the last slash."""
        return self.address.rpartition("/")[2]

    def read_bytes(self) -> bytes:
        """Return the file's content; raise OSError if it can't be read."""
        with _as_os_error(self.address), self.system.open_input_file(self.place) as file:
            return bytes(file.read())

    def read_text(self) -> str:
        """Return the content of the UTF-8 file; raise OSError if it can't be read."""
        return self.read_bytes().decode()


class StoredFiles:
    """A prefix of an object store, or a folder of another remote file system (`gmeta.core.files.Files`).

    Args:
      address: Such as ``s3://bucket/prefix``.
      system: A pyarrow file system, and the root in it; None: those of the address.
    """

    may_follow = 1

    def __init__(self, address: str, system: tuple[Any, str] | None = None) -> None:
        self._address = address.rstrip("/")
        self._system, root = system or within(self._address)
        self._root = root.rstrip("/")
        self._token: bytes | None = None
        self._stores_objects = address.partition("://")[0] in _OBJECT_STORES

    def __str__(self) -> str:
        return self._address

    def path(self, name: str) -> StoredPath:
        """Return the address of a file or folder."""
        return StoredPath(f"{self._address}/{name}", self._system, f"{self._root}/{name}")

    def list(self) -> dict[str, int]:
        """Return the files, without hidden ones, and their sizes in bytes."""
        return {name: size for name, size in self._all() if not re.search(r"(^|/)\.", name)}

    def _all(self) -> Iterator[tuple[str, int]]:
        from pyarrow import fs

        with _as_os_error(self._address):
            chosen = fs.FileSelector(self._root, recursive=True, allow_not_found=True)
            found = self._system.get_file_info(chosen)
        base = self._root.strip("/")
        for each in found:
            if each.type == fs.FileType.File:
                name = each.path.partition(f"{base}/")[2] if base else each.path.lstrip("/")
                yield name, each.size or 0

    def read(self, name: str) -> bytes:
        """Return a file's content."""
        return self.path(name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        """Write a file."""
        from pyarrow import BufferReader

        with self._explained(name):
            self._put(name, BufferReader(data))

    def _put(self, name: str, source: Any) -> None:
        """Write what a file has, under its name or first under another one."""
        self._check_claim()
        final = f"{self._root}/{name}"
        if self._stores_objects:
            self._copy(source, final)
            return
        folder, _, own = final.rpartition("/")
        temporary = f"{folder}/.{own}.{uuid.uuid4().hex}.tmp"
        self._system.create_dir(folder, recursive=True)
        try:
            self._copy(source, temporary)
            if name == _WRITER:  # the only file that is replaced, which some file systems refuse
                self._delete(name)
            self._system.move(temporary, final)
        except BaseException:
            with suppress(Exception):
                self._system.delete_file(temporary)
            raise

    def _copy(self, source: Any, name: str) -> None:
        with self._system.open_output_stream(name) as out:
            while data := source.read(_AT_ONCE):
                out.write(data)

    @contextmanager
    def folder(self, name: str, last: str) -> Iterator[Path]:
        """Write a folder, whose file ``last`` appears last."""
        import pyarrow as pa

        with tempfile.TemporaryDirectory(prefix="gmeta-") as temporary:
            made = Path(temporary) / "folder"
            yield made
            files = sorted(path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file())
            try:
                with self._explained(name):
                    for each in sorted(files, key=lambda each: each == last):
                        with pa.OSFile(str(made / each)) as source:
                            self._put(f"{name}/{each}", source)
            except BaseException:
                self.remove(name, last)
                raise

    def remove(self, name: str, first: str = "") -> None:
        """Remove a file or folder, of a folder the file ``first`` first; errors are ignored."""
        with suppress(Exception):
            if first:
                self._delete(f"{name}/{first}")
            from pyarrow import fs

            path = f"{self._root}/{name}"
            if self._system.get_file_info(path).type == fs.FileType.Directory:
                self._system.delete_dir(path)
            else:
                self._delete(name)

    def _delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._system.delete_file(f"{self._root}/{name}")

    def claim(self, refusal: str) -> Callable[[], None]:
        """Become the only writer: an earlier one is refused at its next file."""
        self._token = None
        token = uuid.uuid4().hex.encode()
        self.write(_WRITER, token)
        self._token = token
        for name, _ in self._all():
            if name.rpartition("/")[2].startswith(".") and name.endswith(".tmp"):
                self._delete(name)
        return self._release

    def _release(self) -> None:
        self._token = None

    def _check_claim(self) -> None:
        if self._token is not None and self.read(_WRITER) != self._token:
            raise ConfigError(
                f"{self} has been taken over by another writer, which was started later: end one of the two, "
                "or give them different addresses"
            )

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Convert an error of the block to one line with the address, the cause and advice."""
        try:
            yield
        except GmetaError:
            raise
        except Exception as error:  # packages of fsspec raise errors of their own
            text = f"{type(error).__name__}: {error}"
            advice = next((f": {advice}" for words, advice in _ADVICE if re.search(words, text)), "")
            said = getattr(error, "strerror", None) or first_line(error)
            raise GmetaError(f"can't write {self.path(name)}: {said}{advice}") from error


@contextmanager
def _as_os_error(address: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(2, "No such file or directory", address) from error
    except Exception as error:  # packages of fsspec raise errors of their own
        raise OSError(5, first_line(error), address) from error


def open_files(folder: str | os.PathLike[str]) -> LocalFiles | StoredFiles:
    """Return the files below a local path, or an address of another scheme.

    Raises:
      ConfigError: Neither pyarrow nor fsspec knows the scheme; or as for `check_requirements`.

    Example:
      >>> str(open_files("online"))
      'online'
    """
    text = os.fspath(folder)
    if (local := local_path(text)) is not None:
        return LocalFiles(local)
    check_requirements(text)
    if (why := lacks(text.partition("://")[0])) is not None:
        raise ConfigError(f"{text}: {why}")
    try:
        return StoredFiles(text)
    except Exception as error:  # for example, a bucket's name that isn't valid
        raise ConfigError(f"{text}: {first_line(error)}") from error


# What a file system requires, which is reported in one line before it is used.


def check_requirements(path: str) -> None:
    """Check that this process has what an address' file system requires, without accessing it.

    Raises:
      ConfigError: A requirement is missing: for ``hdfs``, Java, a Hadoop with libhdfs.so, and a CLASSPATH;
        for ``s3``, complete credentials. The error is one line that names what to install or set.
    """
    scheme = path.partition("://")[0]
    if scheme in ("hdfs", "viewfs", "har"):
        _check_hadoop(path)
    if scheme == "s3":
        _check_aws(path)


def _check_hadoop(path: str) -> None:
    def refuse(what: str, advice: str) -> ConfigError:
        return ConfigError(f"{path}: {what}: {advice}")

    java = os.environ.get("JAVA_HOME")
    if not java or not Path(java).is_dir():
        said = "isn't set" if not java else f"is {java}, which is no folder"
        raise refuse(f"reading it needs Java, and JAVA_HOME {said}", "set JAVA_HOME to a Java's folder")
    homes = {name: os.environ[name] for name in ("HADOOP_HDFS_HOME", "HADOOP_HOME") if os.environ.get(name)}
    if not homes:
        raise refuse(
            "reading it needs Hadoop, and neither HADOOP_HOME nor HADOOP_HDFS_HOME is set",
            "install Hadoop and set HADOOP_HOME to its folder",
        )
    native = {name: Path(home) / "lib" / "native" / "libhdfs.so" for name, home in homes.items()}
    there = [name for name, library in native.items() if library.is_file()]
    on_path = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    if not there and not any(folder and (Path(folder) / "libhdfs.so").is_file() for folder in on_path):
        raise refuse(
            f"there is no {next(iter(native.values()))}",
            f"set {next(iter(native))} to a Hadoop with its native libraries",
        )
    if not os.environ.get("CLASSPATH"):
        raise refuse(
            "CLASSPATH isn't set, so Java won't find Hadoop",
            'export CLASSPATH="$($HADOOP_HOME/bin/hadoop classpath --glob)"',
        )
    if there and "HADOOP_HDFS_HOME" not in there:  # where TensorFlow looks for the library
        os.environ["HADOOP_HDFS_HOME"] = homes[there[0]]


def _check_aws(path: str) -> None:
    have = {name for name, value in os.environ.items() if value}
    pair = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    if len(pair & have) == 1:
        (missing,) = pair - have
        raise ConfigError(f"{path}: {missing} isn't set, {next(iter(pair & have))} is: set both, or neither")
    settings = Path.home() / ".aws"
    files = {
        "credentials": Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", settings / "credentials")),
        "config": Path(os.environ.get("AWS_CONFIG_FILE", settings / "config")),
    }
    roles = {"AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_ROLE_ARN"}
    unknown = []
    if not (pair | roles) & have and not any(file.is_file() for file in files.values()):
        unknown.append(
            "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or write "
            f"{files['credentials']}, unless this machine has a role"
        )
    if not {"AWS_REGION", "AWS_DEFAULT_REGION", "S3_ENDPOINT"} & have and not files["config"].is_file():
        unknown.append("no region: set AWS_REGION")
    if unknown:
        warnings.warn(f"{path}: found {'; '.join(unknown)}", stacklevel=5)
