"""Runs the CUDA source that TVM generates for a kernel on the CPU, one fiber per CUDA thread, so that indexing,
synchronisation and tensor-core fragment layouts are checked on machines without a GPU.

Slow and single-threaded: small shapes only. It says nothing about speed, memory ordering between blocks or
machine code; the tests marked `gpu` do.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
CACHE = Path(tempfile.gettempdir()) / f"cuda_emulator_{os.getuid()}"
FLAGS = ("-std=c++17", "-O1", "-fno-strict-aliasing", "-mf16c", "-mavx2", "-fPIC", "-w")

# mnemonic pattern → C++ statement; %o and %i are the output and input expressions in order
RULES: list[tuple[str, Any]] = [
    (r"ld\.global(\.nc|\.cg)?(\.L\S+?)?\.v4\.b32", lambda o, i, m: f"memcpy4({', '.join(o)}, {i[0]});"),
    (r"ld\.global(\.nc|\.cg)?(\.L\S+?)?\.v2\.b32", lambda o, i, m: "".join(
        f"memcpy(&{v}, (const char*){i[0]} + {4 * k}, 4);" for k, v in enumerate(o))),
    (r"ld\.global(\.nc|\.cg)?(\.L\S+?)?\.b32", lambda o, i, m: f"memcpy(&{o[0]}, {i[0]}, 4);"),
    (r"st\.(global|shared)\.v[24]\.b32", lambda o, i, m: "".join(
        f"memcpy(({_base(m)}{i[0]}) + {4 * k}, &{v}, 4);" for k, v in enumerate(i[1:]))),
    (r"ld\.shared\.v[24]\.b32", lambda o, i, m: "".join(
        f"memcpy(&{v}, (char*)emu::smem + {i[0]} + {4 * k}, 4);" for k, v in enumerate(o))),
    (r"st\.global\.b16", lambda o, i, m: f"{{ uint16_t half = {i[1]}; memcpy((char*){i[0]}, &half, 2); }}"),
    (r"st\.global\.b32", lambda o, i, m: f"memcpy((char*){i[0]}, &{i[1]}, 4);"),
    (r"ex2\.approx\.ftz\.f32", lambda o, i, m: f"{o[0]} = exp2f({i[0]});"),
    (r"lg2\.approx\.ftz\.f32", lambda o, i, m: f"{o[0]} = log2f({i[0]});"),
    (r"rcp\.approx\.ftz\.f32", lambda o, i, m: f"{o[0]} = 1.0f / {i[0]};"),
    (r"cvt\.rn\.bf16x2\.f32", lambda o, i, m:
        f"{o[0]} = (uint32_t)nv_bfloat16({i[0]}).bits << 16 | nv_bfloat16({i[1]}).bits;"),
    (r"cvt\.rn\.satfinite\.e4m3x2\.f32", lambda o, i, m:
        f"{o[0]} = emu::to_e4m3({i[0]}) << 8 | emu::to_e4m3({i[1]});"),
    (r"div\.rn\.f32", lambda o, i, m: f"{o[0]} = {i[0]} / {i[1]};"),
    (r"cvt\.rn\.f16x2\.f32", lambda o, i, m: f"{o[0]} = (uint32_t)half({i[0]}).bits << 16 | half({i[1]}).bits;"),
    (r"cvt\.rn\.satfinite\.e4m3x2\.f32", lambda o, i, m: "abort();"),    # of a branch for the GPU, beside one for others
    (r"prmt\.b32", lambda o, i, m: f"{o[0]} = emu::prmt({', '.join(i)});"),
    (r"fma\.rn\.(bf16|f16)x2", lambda o, i, m:
        f"{o[0]} = emu::fma2<{'true' if '.bf16' in m else 'false'}>({', '.join(i)});"),
    (r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.\S+", lambda o, i, m:
        f"{{ float d[4], c[4] = {{{', '.join(i[6:])}}}; emu::MmaRegs r = {{{{{', '.join(i[:4])}}}, "
        f"{{{', '.join(i[4:6])}}}}}; emu::mma<{'true' if '.bf16.' in m else 'false'}>(d, r, c); "
        + " ".join(f"{v} = d[{k}];" for k, v in enumerate(o)) + " }"),
    (r"mma\.sync\.aligned\.m16n8k[48]\.row\.col\.f32\.tf32\.tf32\.f32", lambda o, i, m: _mma_tf32(o, i)),
    (r"ldmatrix\.sync\.aligned\.m8n8\.x4(\.trans)?\.shared\.b16", lambda o, i, m:
        f"{{ uint32_t r[4]; emu::ldmatrix4<{'true' if '.trans' in m else 'false'}>(r, {i[0]}); "
        + " ".join(f"{v} = r[{k}];" for k, v in enumerate(o)) + " }"),
    (r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16", lambda o, i, m: f"{o[0]} = emu::movmatrix({i[0]});"),
    (r"\{ \.reg \.pred ps0; setp\.ne\.b32 ps0, %\d+, 0; wgmma\.mma_async\S+", lambda o, i, m: _wgmma(o, i, m)),
    (r"wgmma\.(fence|commit_group|wait_group)\.\S+", lambda o, i, m: ""),
    (r"(setmaxnreg|fence\.proxy|prefetch\.tensormap|griddepcontrol\.launch_dependents)\S*", lambda o, i, m: ""),
    (r"griddepcontrol\.wait", lambda o, i, m: "emu::grid_wait();"),
    (r"mov\.u32 %0, %%cluster_ctarank", lambda o, i, m: f"{o[0]} = emu::cur->rank;"),
    (r"mov\.u32 %0, %clusterid\.x", lambda o, i, m: f"{o[0]} = emu::block_idx.x / emu::cluster;"),
    (r"mapa\.shared::cluster\.u32", lambda o, i, m: f"{o[0]} = emu::mapa({i[0]}, {i[1]});"),
    (r"st\.shared::cluster\.v[24]\.f32", lambda o, i, m: (
        f"{{ unsigned char* p = emu::remote({i[0]}, {4 * len(i[1:])}); "
        + "".join(f"memcpy(p + {4 * k}, &{v}, 4); " for k, v in enumerate(i[1:])) + "}")),
    (r"ld\.global\.v4\.f32", lambda o, i, m: f"memcpy4({', '.join(o)}, {i[0]});"),
    (r"ld\.shared\.v[24]\.f32", lambda o, i, m: "".join(
        f"memcpy(&{v}, emu::smem + {i[0]} + {4 * k}, 4);" for k, v in enumerate(o))),
    (r"barrier\.cluster\.arrive\S*", lambda o, i, m: "emu::cluster_arrive();"),
    (r"barrier\.cluster\.wait\S*", lambda o, i, m: "emu::cluster_wait();"),
    (r"\{ \.reg \.pred p; setp\.lt\.f32 p, %0, 0f00000000; @p exit; \}", lambda o, i, m:
        f'if ({i[0]} < 0) {{ fprintf(stderr, "a thread would exit\\n"); abort(); }}'),
    (r"\{ \.reg \.pred p; elect\.sync _\|p, 0xffffffff; selp\.b32 %0, 1, 0, p; \}", lambda o, i, m:
        f"{o[0]} = emu::lane_id() == 0;"),
    (r"bar\.sync", lambda o, i, m: f"emu::named_sync({i[0]}, {i[1]});"),
    (r"bar\.arrive", lambda o, i, m: f"emu::named_arrive({i[0]}, {i[1]});"),
    (r"mbarrier\.init\.\S+", lambda o, i, m: f"emu::mbarrier_init({i[0]}, {i[1]});"),
    (r"mbarrier\.arrive\.expect_tx\.shared\.b64", lambda o, i, m: f"emu::mbarrier_arrive({i[0]}, {i[1]});"),
    (r"\{ \.reg \.pred p; setp\.ne\.b32 p, %1, 0; @p mbarrier\.arrive\.shared::cluster\.b64", lambda o, i, m:
        f"if ({i[1]}) emu::mbarrier_arrive({i[0]});"),
    (r"fence\.mbarrier_init\.release\.cluster", lambda o, i, m: ""),
    (r"cp\.async\.bulk\.tensor\.\dd\.shared::cluster\.global\S*", lambda o, i, m: _tma_load(i, m)),
    (r"cp\.async\.bulk\.shared::cluster\.global\S*", lambda o, i, m: f"emu::bulk_load({', '.join(i[:4])});"),
    (r"cp\.async\.bulk\.tensor\.\dd\.global\.shared::cta\S*", lambda o, i, m:
        f"emu::tma_store({i[0]}, {{{', '.join(i[1:-1])}}}, {i[-1]});"),
    (r"cp\.async\.bulk\.commit_group", lambda o, i, m: ""),          # every store is a group of its own
    (r"cp\.async\.bulk\.wait_group(\.read)?", lambda o, i, m: f"emu::tma_wait({m.split()[-1]});"),
    (r"stmatrix\.sync\.aligned\.m8n8\.x4\.shared\.b16", lambda o, i, m:
        f"{{ uint32_t r[4] = {{{', '.join(i[1:])}}}; emu::stmatrix4({i[0]}, r); }}"),
    (r"ld\.shared(::cluster)?\.v4\.f32", lambda o, i, m: "".join(
        f"memcpy(&{v}, emu::at({i[0]}) + {4 * k}, 4);" for k, v in enumerate(o))),
    (r"st\.global\.v[24]\.f32", lambda o, i, m: "".join(
        f"memcpy((char*){i[0]} + {4 * k}, &{v}, 4);" for k, v in enumerate(i[1:]))),
    (r"mbarrier\.arrive\.shared\.b64", lambda o, i, m: f"emu::mbarrier_arrive({i[0]});"),
    (r"\{ \.reg \.pred p; setp\.ne\.b32 p, %1, 0; @p mbarrier\.arrive\.shared\.b64", lambda o, i, m:
        f"if ({i[1]}) emu::mbarrier_arrive({i[0]});"),
    (r"", lambda o, i, m: "" if not m else None),
    (r"cp\.async\.commit_group", lambda o, i, m: "emu::commit_group();"),
    (r"cp\.async\.wait_group", lambda o, i, m: f"emu::wait_group({m.split()[-1]});"),
    (r"cp\.async\.c[ga]\.shared\.global\S*", lambda o, i, m:
        f"emu::cp_async({i[0]}, {i[1]}, {_copy_bytes(m)}, {i[2] if len(i) > 2 else _copy_bytes(m)});"),
]
ASM = re.compile(r'asm(?: volatile)?\("([^"]*)"\s*:([^;]*?)(?::([^;]*?))?(?::\s*"memory"\s*)?\);', re.S)
OPERAND = re.compile(r'"[^"]*"\(((?:[^()]|\([^()]*\))*)\)')


def _mma_tf32(out: list[str], inp: list[str]) -> str:
    k = (len(inp) - 4) // 3 * 4
    a, b, c = inp[:k // 2], inp[k // 2:-4], inp[-4:]
    return (f"{{ float d[4], c[4] = {{{', '.join(c)}}}; emu::MmaRegs r = {{{{{', '.join(a)}}}, {{{', '.join(b)}}}}}; "
            f"emu::mma_tf32<{k}>(d, r, c); " + " ".join(f"{v} = d[{n}];" for n, v in enumerate(out)) + " }")


def _wgmma(out: list[str], inp: list[str], text: str) -> str:
    """Accumulators are read and written; A is a descriptor or four registers; the tail is scale_d, signs, transposes."""
    n = int(re.findall(r"m64n(\d+)k", text)[0])
    if ".e4m3." in text:
        return (f"{{ float c[{n // 2}] = {{{', '.join(out)}}}; emu::wgmma8<{n}>(c, {inp[0]}, {inp[1]}, {inp[2]}); "
                + " ".join(f"{v} = c[{k}];" for k, v in enumerate(out)) + " }")
    tail = [int(v) for v in re.findall(r"ps0, ([-\d, ]+);", text)[0].split(",")][2:]
    in_registers = len(inp) == 6
    a = "a" if in_registers else "nullptr"
    transposes = [0, *tail] if in_registers else tail
    return (f"{{ float c[{n // 2}] = {{{', '.join(out)}}}; "
            + (f"uint32_t a[4] = {{{', '.join(inp[:4])}}}; " if in_registers else "")
            + f"emu::wgmma<{'true' if '.bf16.' in text else 'false'}, {n}>(c, {a}, {'0' if in_registers else inp[0]}, "
            f"{inp[-2]}, {inp[-1]}, {transposes[0]}, {transposes[1]}); "
            + " ".join(f"{v} = c[{k}];" for k, v in enumerate(out)) + " }")


def _tma_load(inp: list[str], text: str) -> str:
    rank = int(re.findall(r"tensor\.(\d)d", text)[0])
    mask = inp[3 + rank] if "multicast" in text else "1u << emu::cur->rank"
    return f"emu::tma_load({inp[0]}, {inp[1]}, {{{', '.join(inp[2:2 + rank])}}}, {inp[2 + rank]}, {mask});"


def _copy_bytes(text: str) -> str:
    return re.findall(r"\], (\d+)", text)[0]


def _base(mnemonic: str) -> str:
    return "(char*)emu::smem + " if mnemonic.startswith("st.shared") else "(char*)"


def _translate(match: re.Match[str]) -> str:
    text = match[1].strip().rstrip(";")
    out, inp = OPERAND.findall(match[2]), OPERAND.findall(match[3] or "")
    for pattern, emit in RULES:
        if re.match(pattern + r"(\s|$)", text) and (code := emit(out, inp, text)) is not None:
            return code
    raise NotImplementedError(f"the emulator has no rule for: {text}")


class TensorMap(ctypes.Structure):
    """What cuTensorMapEncodeTiled was told about an array of elements of 2 or 4 bytes, laid out as the emulator's Map.
    Sizes, strides in bytes (of all dimensions but the first one) and box, the contiguous dimension first; swizzle 0 to 3."""

    _fields_ = [("data", ctypes.c_void_p), ("rank", ctypes.c_int64), ("sizes", ctypes.c_int64 * 5),
                ("strides", ctypes.c_int64 * 5), ("box", ctypes.c_int64 * 5), ("swizzle", ctypes.c_int64)]

    def __init__(self, array: np.ndarray, element: int, sizes: list[int], strides: list[int], box: list[int],
                 swizzle: int) -> None:
        assert sum((n - 1) * s for n, s in zip(sizes, [element, *strides], strict=True)) + element <= array.nbytes
        super().__init__(array.ctypes.data, len(sizes), (ctypes.c_int64 * 5)(*sizes),
                         (ctypes.c_int64 * 5)(element, *strides), (ctypes.c_int64 * 5)(*box), swizzle)


def _emulator() -> Path:
    """A folder for kernels with the emulator in it: its object, and its header precompiled. Without them, four fifths of
    what g++ does for a kernel would be the emulator again."""
    header, code = HERE / "cuda_emulator.h", HERE / "cuda_emulator.cc"
    key = hashlib.sha256(header.read_bytes() + code.read_bytes() + repr(FLAGS).encode()).hexdigest()
    folder = CACHE / key[:24]
    folder.mkdir(parents=True, exist_ok=True)
    _compile(folder / "cuda_emulator.h.gch", "-x", "c++-header", header)       # found as it is the first -I of a kernel
    _compile(folder / "emulator.o", "-c", code)
    return folder


def _compile(made: Path, *arguments: str | Path, source: str = "") -> None:
    """By g++ unless it is there; `source` is its standard input. Beside its place and then renamed: another test process
    may look for it, and this one may be killed."""
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=made.parent) as folder:
            beside = Path(folder) / made.name
            subprocess.run(["g++", *FLAGS, *arguments, "-o", beside], input=source, text=True, check=True)
            beside.replace(made)


class EmulatedModule:
    """Kernels of one generated CUDA source, callable with NumPy arrays."""

    def __init__(self, source: str) -> None:
        body = source[source.index("#define ushort unsigned short"):]
        body = body[body.index("#endif") + len("#endif"):]
        body = body.replace('asm("barrier.cluster.arrive.aligned;");', "emu::cluster_arrive();")
        body = body.replace('asm("barrier.cluster.wait.aligned;");', "emu::cluster_wait();")
        body = ASM.sub(_translate, re.sub(r"#include <\w+\.h>\n", "", body))
        body = re.sub(r'asm volatile\(\s*"\{\\n"\s*"\.reg \.pred\s+P1;\\n"\s*"LAB_WAIT.*?"memory"\);',
                      "emu::mbarrier_wait(barrier_addr_int, phase);", body, flags=re.S)
        self.parameters: dict[str, list[tuple[str, str]]] = {}
        wrappers = []
        for m in re.finditer(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(([^)]*)\);', body):
            params = [p.strip().rsplit(" ", 1) for p in m[2].split(",")]
            self.parameters[m[1]] = [(t.strip(), n) for t, n in params]
            args = ", ".join(f"*({t.replace('__restrict__', '')}*)a[{k}]" for k, (t, _) in enumerate(self.parameters[m[1]]))
            wrappers.append(f'extern "C" void emu_{m[1]}(void** a) {{ {m[1]}({args}); }}')
        body = re.sub(r"extern __shared__ __align__\(\d+\) uchar (\w+)\[\];", r"uchar* \1 = emu::smem;", body)
        body = re.sub(r"__cvta_generic_to_shared\((\w+)\)", r"(unsigned)((unsigned char*)\1 - emu::smem)", body)
        body = re.sub(r"\b__shared__ ", "static ", body)
        prelude = ('#include "cuda_emulator.h"\n'
                   "template <class V> void memcpy4(V& a, V& b, V& c, V& d, const void* p) {\n"
                   "  if ((uintptr_t)p % 16) { fprintf(stderr, \"16-byte load not aligned\\n\"); abort(); }\n"
                   "  const V* q = (const V*)p; a = q[0]; b = q[1]; c = q[2]; d = q[3]; }\n")
        text = prelude + body + "\n" + "\n".join(wrappers) + "\n"
        emulator = _emulator()
        library = emulator / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.so"
        _compile(library, "-shared", f"-I{emulator}", f"-I{HERE}", "-x", "c++", "-", "-x", "none", emulator / "emulator.o",
                 source=text)
        self._library = ctypes.CDLL(str(library))

    def run(self, kernel: str, grid: tuple[int, ...], threads: int, cluster: int = 1, late: Collection[str] = (),
            **arguments: Any) -> None:
        """Arguments by the kernel's parameter names; a buffer `x` of the PrimFunc is parameter `x_ptr`, given as `x`;
        a tensor map is given as TensorMap. Arrays are changed in place. 16-bit floats travel as uint16. `cluster` blocks
        along x form a cluster. Arrays named in `late` are written by the kernel before: all ones until no thread can go on
        without griddepcontrol.wait."""
        holders, pointers = [], []
        for ctype, name in self.parameters[kernel]:
            short = name.removesuffix("_ptr")
            value = arguments[name if name in arguments else short]
            if "CUtensorMap" in ctype:
                holders.append(value)
            elif "*" in ctype:
                assert isinstance(value, np.ndarray) and value.flags.c_contiguous, name
                holders.append(ctypes.c_void_p(value.ctypes.data))
            elif "int64" in ctype:
                holders.append(ctypes.c_int64(value))
            elif "float" in ctype:
                holders.append(ctypes.c_float(value))
            else:
                holders.append(ctypes.c_int32(value))
            pointers.append(ctypes.cast(ctypes.pointer(holders[-1]), ctypes.c_void_p))
        contents = [(arguments[name], arguments[name].copy()) for name in late]
        for buffer, content in contents:
            self._library.emu_late(ctypes.c_void_p(buffer.ctypes.data), ctypes.c_void_p(content.ctypes.data),
                                   ctypes.c_long(content.nbytes))
        array = (ctypes.c_void_p * len(pointers))(*pointers)
        full = (*grid, 1, 1)[:3]
        entry = getattr(self._library, f"emu_{kernel}")
        status = self._library.emu_run(ctypes.cast(entry, ctypes.c_void_p), array, *full, threads, cluster)
        assert status == 0, f"{kernel}: the emulated kernel deadlocked"
