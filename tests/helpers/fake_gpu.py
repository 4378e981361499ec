"""Runs scenarios in a process whose PyTorch treats ``cuda`` as a device with tensors that have no content
(``FakeTensorMode`` with autograd).

A build of PyTorch without CUDA has no device guard and no hooks for this device, which autograd needs for streams. A
small library provides both, and must be loaded before PyTorch. Scenarios therefore run in a separate process: ``python
-m tests.helpers.fake_gpu LIBRARY MODULE:FUNCTION ARGUMENTS`` prints the result of the function as JSON.
"""

import ctypes
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
_MARK = "result: "
_SOURCE = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto CUDA = c10::DeviceType::CUDA;

struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  at::DeviceIndex deviceCount() const override { return 1; }
  at::DeviceIndex getCurrentDevice() const override { return 0; }
};

// One device with one stream, on which everything is in order.
struct Guard : c10::impl::NoOpDeviceGuardImpl<CUDA> {
  c10::Device getDevice() const override { return c10::Device(CUDA, 0); }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(CUDA, 0));
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

}  // namespace

namespace at {
using CUDAHooks = ::Hooks;
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at
"""


def build(folder: Path) -> Path:
    """Compile the library into ``folder``, which takes about two seconds."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None, "PyTorch is installed"
    root, source, library = Path(spec.origin).parent, folder / "fake_gpu.cpp", folder / "fake_gpu.so"
    source.write_text(_SOURCE)
    libraries = [f"-L{root}/lib", f"-Wl,-rpath,{root}/lib", "-Wl,--no-as-needed", "-lc10", "-ltorch_cpu", "-ltorch"]
    flags = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{root}/include"]
    subprocess.run(
        ["g++", *flags, str(source), *libraries, "-o", str(library)],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return library


def run(library: Path, entry: str, arguments: dict[str, Any] | None = None, *, timeout_seconds: float = 300.0) -> Any:
    """Run ``entry`` (``module:function``) with keyword ``arguments`` in such a process, and return its result as JSON.

    Raises:
        AssertionError: it raised; its traceback is in the message.
    """
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.helpers.fake_gpu",
            str(library),
            entry,
            json.dumps(arguments or {}),
        ],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    # PyTorch lists all kernels of an operation that it lacks for a device.
    reported = "\n".join(line for line in done.stderr.splitlines() if " registered at /" not in line)
    assert done.returncode == 0, reported[-6000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    return json.loads(line.removeprefix(_MARK))


def _main(library: str, entry: str, arguments: str) -> None:
    ctypes.CDLL(library)
    module, _, function = entry.partition(":")
    result = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    print(_MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
