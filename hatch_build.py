"""Compile the C kernels when a wheel is built or the project is installed in editable mode.

Without a compiler the package is built without them and works. TOKENMIX_BUILD_KERNELS=0 leaves them out;
TOKENMIX_BUILD_KERNELS=require makes a failure to build them an error.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "tokenmix/kernels/cpu"
SWITCH = "TOKENMIX_BUILD_KERNELS"


class KernelBuildHook(BuildHookInterface):
    """Build a wheel for this platform that holds the library; one for any platform where it could not be built.

    Source archives do not hold it.
    """

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the library before hatchling collects files; ``version`` is "standard" or "editable"."""
        choice = os.environ.get(SWITCH, "1").lower()
        if self.target_name != "wheel" or choice == "0":
            return
        maker = builder(Path(self.root))
        try:
            tag = platform_tag()
            library = maker.LIBRARY if maker.current() else maker.build()
        except maker.BuildError as why:
            if choice == "require":
                raise
            print(
                "warning: tokenmix is installed without its C kernels and works without them, slower: "
                f"{first_line(why)}",
                file=sys.stderr,
            )
            return
        build_data["pure_python"], build_data["tag"] = False, f"py3-none-{tag}"
        if version != "editable":  # there the library lies beside its sources already
            build_data["force_include"][str(library)] = f"{FOLDER}/{library.name}"


def builder(root: Path) -> ModuleType:
    """Load kernels/cpu/build.py by path: the package itself needs torch, which building does not."""
    spec = importlib.util.spec_from_file_location("tokenmix_kernels_build", root / "src" / FOLDER / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def platform_tag() -> str:
    """Return the tag of the machine the compiler builds for: this one.

    On macOS, Python may be built for two kinds of machine and for older systems; the library is not.
    """
    if sys.platform != "darwin":
        return sysconfig.get_platform().replace("-", "_").replace(".", "_")
    wanted = os.environ.get("MACOSX_DEPLOYMENT_TARGET") or platform.mac_ver()[0]
    major, minor = (int(n) for n in (wanted.split(".") + ["0"])[:2])
    return f"macosx_{major}_{0 if major > 10 else minor}_{platform.machine()}"


def first_line(why: Exception) -> str:
    """Return an error in one line."""
    lines = [line for line in str(why).splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines else type(why).__name__
