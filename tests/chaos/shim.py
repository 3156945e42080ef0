"""A disk that misbehaves on command, for one process: shim.c, compiled here and loaded before libc."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

from chaos.fault import CannotRunError

LAYOUT = struct.Struct("=iii")  # struct control of shim.c
FIELDS = ("write_errno", "sync_errno", "num_faults")


class Shim:
    """environment: for the process. Raises CannotRunError without a C compiler."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise CannotRunError("needs a C compiler (cc) to make a disk that misbehaves")
        library, control = folder / "shim.so", folder / "shim.control"
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", library, Path(__file__).with_name("shim.c"), "-ldl"]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            raise CannotRunError(f"{compiler} cannot compile shim.c: {made.stderr.strip().splitlines()[-1:]}")
        control.write_bytes(bytes(LAYOUT.size))
        with control.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), LAYOUT.size)
        self.environment = {"LD_PRELOAD": str(library), "CHAOS_SHIM": str(control)}

    def set(self, **values: int) -> None:
        """From now on; what is not named is as it should be."""
        wrong = {"num_faults": self.num_faults, **values}
        LAYOUT.pack_into(self._memory, 0, *(wrong.get(name, 0) for name in FIELDS))

    @property
    def num_faults(self) -> int:
        return LAYOUT.unpack_from(self._memory, 0)[-1]
