"""Let `import fused_attn` find the modules that were built for the simulated GPU.

They are not in the package's folder, whose modules are for another Python or contain a CUDA
runtime that needs a real driver.
"""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from sysconfig import get_config_var

BUILT = Path(__file__).resolve().parents[3] / "build" / "pretended-gpu" / "cmake"
NAMES = {"fused_attn._cpu", "fused_attn._cuda"}


class BuiltModules:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in NAMES:
            return None
        file = BUILT / (name.rpartition(".")[2] + get_config_var("EXT_SUFFIX"))
        return spec_from_file_location(name, file) if file.exists() else None


sys.meta_path.insert(0, BuiltModules)
