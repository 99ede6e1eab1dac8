"""The metadata of wheels, and functions that libraries for older machines bind to old versions."""

import ctypes
import math
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools/dev")]

import build_wheel  # noqa: E402

NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
"""What manylinux_2_28 allows (PEP 600)."""

# Of C and C++, what has a newer version than that: threads, libdl, exp, an exception that is kept.
SOURCE = """
#include <cmath>
#include <condition_variable>
#include <dlfcn.h>
#include <exception>
#include <memory>
#include <mutex>
#include <sys/stat.h>
#include <thread>
#include <vector>

extern "C" double answer(double x, int size) {
  std::mutex lock;
  std::condition_variable ready;
  std::exception_ptr first;
  std::thread thread([&] {
    try {
      throw 40.0;
    } catch (...) {
      std::unique_lock<std::mutex> held(lock);
      first = std::current_exception();
    }
    ready.notify_all();
  });
  {
    std::unique_lock<std::mutex> held(lock);
    ready.wait(held, [&] { return first != nullptr; });
  }
  thread.join();
  const std::exception_ptr second = first;
  first = nullptr;
  double found = 0;
  try {
    std::rethrow_exception(second);
  } catch (double thrown) {
    found = thrown;
  }
  const auto numbers = std::make_shared<std::vector<double>>(size);
  const auto shared = numbers;
  struct stat file;
  found += fstat(0, &file) == 0 || dlsym(nullptr, "answer") == nullptr;
  return found + std::exp(x) + std::log(x) + std::pow(x, 2.5) + shared.use_count() + numbers->size();
}
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="wheels are for x86-64")
def test_a_library_for_wheels_asks_for_old_versions_alone(tmp_path):
    (tmp_path / "answer.cc").write_text(SOURCE)
    sources = ["answer.cc", ROOT / "ops/common/manylinux.cc"]
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-Wl,--gc-sections"]
    subprocess.run(["g++", *flags, "-o", "answer.so", *sources, "-pthread", "-ldl"], cwd=tmp_path, check=True)
    symbols = subprocess.run(
        ["objdump", "-T", tmp_path / "answer.so"], capture_output=True, text=True, check=True
    ).stdout
    asked = re.findall(r"\*UND\*.*\((\w+?)_([0-9.]+)\) (\S+)", symbols)
    assert {"exp", "dlsym", "fstat"} & {name for *_, name in asked} == {"exp", "dlsym"}
    late = [
        (library, version, name)
        for library, version, name in asked
        if library in NEWEST and tuple(map(int, version.split("."))) > NEWEST[library]
    ]
    assert not late
    answer = ctypes.CDLL(str(tmp_path / "answer.so")).answer
    answer.argtypes, answer.restype = (ctypes.c_double, ctypes.c_int), ctypes.c_double
    assert answer(1.0, 7) == pytest.approx(40 + 1 + math.e + 0 + 1 + 2 + 7)


def test_metadata_ask_for_the_version_that_the_libraries_know():
    given = (
        "Name: gmeta\nVersion: 0.1\nRequires-Dist: tensorflow<2.22,>=2.16\nRequires-Dist: tf-keras>=2.16\n"
    )
    more = 'Requires-Dist: numpy<3\nRequires-Dist: tensorflow-io==0.37.1; extra == "remote"\n'
    asked = "Requires-Dist: tensorflow==2.17.1\nRequires-Dist: tf-keras==2.17.*\n"
    expected = f"Name: gmeta\nVersion: 0.1+tf2.17.1\n{asked}{more}"
    assert build_wheel.ask_for(given + more, "2.17.1") == expected


def test_metadata_without_tensorflow_are_refused():
    with pytest.raises(SystemExit, match="don't ask for tensorflow"):
        build_wheel.ask_for("Version: 0.1\nRequires-Dist: numpy<3\n", "2.17.1")
