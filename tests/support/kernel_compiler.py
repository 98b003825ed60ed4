"""Compiles Triton kernels for GPUs that are not there, and reads what the assembler made of them.

    python -m tests.support.kernel_compiler '[{"module": "parallel3d.kernels.triton_x", "kernel": "_x",
        "signature": {"x": "*bf16", "n": "i32"}, "constants": {"BLOCK": 1024}, "aligned": ["x", "n"]}]'

prints one JSON object for each kernel and architecture. In a process of its own, since other tests interpret kernels.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from importlib import import_module

ARCHITECTURES = (80, 90, 100)


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """One specialisation of a kernel."""

    module: str
    kernel: str
    signature: dict[str, str | list[str]]
    """Argument -> type in Triton's words: "*bf16", "fp32", "i64", a list for a tuple; constants are added as
    "constexpr"."""
    constants: dict[str, object] = field(default_factory=dict)
    """A text may be the name of a format in triton.language, as "float32", or that of a function, "module:name"."""
    aligned: tuple[str, ...] = ()
    """Arguments that are divisible by 16, as torch's pointers are."""
    options: dict[str, object] = field(default_factory=dict)
    """Of the launch: num_warps, enable_fp_fusion."""


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """What the assembler made of a kernel for one architecture."""

    kernel: str
    architecture: int
    registers: int
    spilled_bytes: int
    local_bytes: int
    ptx: str

    @property
    def num_fused_multiply_adds(self) -> int:
        return len(re.findall(r"\bfma\.rn(?:\.ftz)?\.f32\b", self.ptx))

    def accesses(self, operation: str) -> list[int]:
        """Bits of each access to global memory of `operation` "ld" or "st", in order."""
        found = re.findall(rf"\b{operation}\.global\S*?(?:\.v(\d))?\.[bfus](\d+)\b", self.ptx)
        return [int(vector or 1) * int(bits) for vector, bits in found]


def compile_kernels(cases: list[KernelCase]) -> list[CompiledKernel]:
    """Compiles all cases for all architectures in a child process that does not interpret kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.kernel_compiler", json.dumps([asdict(case) for case in cases])]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return [CompiledKernel(**json.loads(line)) for line in done.stdout.splitlines()]


def compile_one(case: KernelCase, architecture: int) -> CompiledKernel:
    """Compiles in this process."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(import_module(case.module), case.kernel)
    signature = case.signature | {name: "constexpr" for name in case.constants}
    order = {name: (number,) for number, name in enumerate(function.arg_names)}
    source = ASTSource(
        fn=function,
        signature={name: _type(signature[name]) for name in function.arg_names},
        constexprs={order[name]: _constant(value) for name, value in case.constants.items()},
        attrs={order[name]: [["tt.divisibility", 16]] for name in case.aligned},
    )
    built = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=dict(case.options))
    usage = _resource_usage(built.asm["cubin"])
    return CompiledKernel(
        kernel=case.kernel,
        architecture=architecture,
        registers=usage["REG"],
        spilled_bytes=usage["STACK"],
        local_bytes=usage["LOCAL"],
        ptx=built.asm["ptx"],
    )


def _type(words: str | list[str]) -> str | tuple[str, ...]:
    return words if isinstance(words, str) else tuple(words)


def _constant(value: object) -> object:
    import triton.language as tl

    if not isinstance(value, str):
        return value
    if ":" in value:
        module, name = value.split(":")
        return getattr(import_module(module), name)
    return getattr(tl, value, value)


def _resource_usage(cubin: bytes) -> dict[str, int]:
    import tempfile
    from pathlib import Path

    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


if __name__ == "__main__":
    for description in json.loads(sys.argv[1]):
        for number in ARCHITECTURES:
            print(json.dumps(asdict(compile_one(KernelCase(**description), number))))
