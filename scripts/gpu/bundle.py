"""Pack vLLM for a GPU machine without a network, for `scripts/gpu_check`: python3.12 scripts/gpu/bundle.py

Run it with the Python version of that machine, which needs torch and transformers. Of vLLM's kernels only code for compute
capability 9.0 (H100, H200) stays, and of its attention kernels FlashAttention 3. Needs readelf and strip (binutils).
Writes pieces that can be carried one by one; `scripts/gpu_check` puts them together.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

VLLM = "vllm==0.32.0"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
ALONE = ("compressed-tensors==0.17.0", "xgrammar>=0.2.1,<1.0.0")  # without what they require, torch among it
NEVER = {"torch", "triton", "setuptools", "pip", "cffi", "cryptography", "pycountry", "pycparser", "tzdata"}
NEWER = {"grpcio", "protobuf"}  # packed although that machine has them: its own are too old
LIBRARIES = ("_C_stable_libtorch", "_moe_C_stable_libtorch", "vllm_flash_attn/_vllm_fa3_C")  # trimmed
SMALL_LIBRARIES = ("spinloop", "cumem_allocator", "fs_io_C")
LEFT_OUT = re.compile(
    r"\.so$|vllm-rs$|third_party/(deep_gemm|fmha_sm100|tml_fa4)/|fused_moe/configs/|quantization/utils/configs/"
    r"|kernels/helion/configs/|\.jpg$|\.png$|swagger-ui"
)
SOURCE_ONLY = (".pyx", ".pxd", ".c", ".cpp", ".h", ".hpp", ".cuh")
PIECE_BYTES = 40_000_000
FATBIN, PTX, CUBIN, CAPABILITY = 0xBA55ED50, 1, 2, 90


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/gpu_bundle"))
    parser.add_argument("--have", type=Path, help="packages of that machine, a name a line; they are not packed")
    arguments = parser.parse_args()
    work = arguments.out / "work"
    shutil.rmtree(work, ignore_errors=True)
    have = set(map(normal, arguments.have.read_text().split())) if arguments.have else set()
    collect_packages(work / "site", have)
    collect_vllm(work / "wheel", work / "vllm")
    archive = work / "bundle.tar.xz"
    with tarfile.open(archive, "w:xz") as tar:
        for name in ("site", "vllm"):
            tar.add(work / name, name)
    whole = archive.read_bytes()
    pieces = [whole[start : start + PIECE_BYTES] for start in range(0, len(whole), PIECE_BYTES)]
    for old in arguments.out.glob("piece-*"):
        old.unlink()
    for number, piece in enumerate(pieces, 1):
        (arguments.out / f"piece-{number}-of-{len(pieces)}").write_bytes(piece)
    shutil.rmtree(work)
    print(f"{len(pieces)} pieces in {arguments.out}, {len(whole) / 1e6:.0f} MB")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments, "-q", "--progress-bar", "off"], check=True)


def collect_packages(site: Path, have: set[str]) -> None:
    """Install what vLLM imports, then take away what that machine has, and what only compilers read."""
    pip("install", "--target", str(site), "-r", str(REQUIREMENTS))
    pip("install", "--target", str(site), "--no-deps", *ALONE)
    for package in list(importlib.metadata.distributions(path=[str(site)])):
        name = normal(package.metadata["Name"])
        unwanted = name in NEVER or name.startswith("nvidia") or name in have - NEWER
        for file in package.files or ():
            if unwanted or file.suffix in SOURCE_ONLY or "tests" in file.parts:
                (site / file).unlink(missing_ok=True)
    for folder in (*site.rglob("__pycache__"), site / "bin"):
        shutil.rmtree(folder, ignore_errors=True)
    for folder in sorted(site.rglob("*/"), reverse=True):  # a folder without files would still pass for a package
        if not any(folder.iterdir()):
            folder.rmdir()


def collect_vllm(wheel: Path, target: Path) -> None:
    """vLLM's Python files and the libraries that are needed, without code for other devices."""
    pip("download", "--no-deps", "--only-binary=:all:", "-d", str(wheel), VLLM)
    with zipfile.ZipFile(next(wheel.glob("vllm-*.whl"))) as archive:
        names = archive.namelist()
        wanted = {f"vllm/{name}.abi3.so" for name in (*LIBRARIES, *SMALL_LIBRARIES)} & set(names)
        archive.extractall(target, [name for name in names if name in wanted or not LEFT_OUT.search(name)])
    shutil.rmtree(wheel)
    for name in LIBRARIES:
        library = target / "vllm" / f"{name}.abi3.so"
        trim(library, drop_others="_moe_" in name)
        subprocess.run(["strip", "--strip-unneeded", str(library)], check=True)


@dataclass(frozen=True, slots=True)
class Code:
    """One kernel image in a library: where it begins, its header's bytes and all its bytes."""

    kind: int
    capability: int
    start: int
    header: int
    size: int


def trim(library: Path, drop_others: bool) -> None:
    """Write zeros over device code that a device of capability 9.0 does not load; they compress to nothing.

    drop_others: of containers without code for it also PTX, which is never compiled there.
    """
    data = bytearray(library.read_bytes())
    position, end = device_code_of(library)
    while position < end - 16:
        magic, _, header, length = struct.unpack_from("<IHHQ", data, position)
        if magic != FATBIN:
            position += 8
            continue
        begin, stop = position + header, position + header + length
        images = list(images_in(data, begin, stop))
        kept = [one for one in images if one.kind == CUBIN and one.capability == CAPABILITY]
        if not kept and drop_others:
            for one in images:  # the headers stay, for whoever walks over them
                data[one.start + one.header : one.start + one.size] = bytes(one.size - one.header)
        else:
            older = [one for one in images if one.kind == PTX and one.capability <= CAPABILITY]
            kept = kept or sorted(older, key=lambda one: one.capability)[-1:]
            kept = kept or sorted(images, key=lambda one: one.size)[:1]  # a container is never empty
            body = b"".join(bytes(data[one.start : one.start + one.size]) for one in kept)
            data[begin:stop] = body + bytes(stop - begin - len(body))
            struct.pack_into("<Q", data, position + 8, len(body))
        position = stop
    library.write_bytes(data)


def device_code_of(library: Path) -> tuple[int, int]:
    """First and last byte of the section that holds device code."""
    table = subprocess.run(["readelf", "-SW", str(library)], capture_output=True, text=True, check=True).stdout
    found = re.search(r"\.nv_fatbin\s+\S+\s+\S+\s+([0-9a-f]+)\s+([0-9a-f]+)", table)
    if found is None:
        raise ValueError(f"{library} has no section .nv_fatbin")
    start, size = (int(number, 16) for number in found.groups())
    return start, start + size


def images_in(data: bytearray, begin: int, stop: int) -> Iterator[Code]:
    while begin < stop:
        kind, _, header = struct.unpack_from("<HHI", data, begin)
        (payload,) = struct.unpack_from("<Q", data, begin + 8)
        (capability,) = struct.unpack_from("<I", data, begin + 28)
        yield Code(kind, capability, begin, header, header + payload)
        begin += header + payload


if __name__ == "__main__":
    main()
