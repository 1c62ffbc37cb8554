"""The one part of the package that is compiled: attention for CPUs with AVX-512. All else is in pyproject.toml."""

from glob import glob

from setuptools import Extension, setup

FOLDER = "src/laga_attn/kernels/avx512"

setup(
    ext_modules=[
        Extension(
            "laga_attn.kernels.avx512._attention",
            [f"{FOLDER}/attention.cpp"],
            depends=sorted(glob(f"{FOLDER}/*.h")),
            # GCC 12 takes its own intrinsics for uses of uninitialised values.
            extra_compile_args=[
                *("-std=c++17", "-O3", "-pthread", "-fvisibility=hidden", "-Wno-maybe-uninitialized"),
                *(f"-m{x}" for x in ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16", "fma")),
            ],
            extra_link_args=["-pthread"],
            optional=True,  # without a compiler, or for another CPU, other kernels compute the same
        )
    ]
)
