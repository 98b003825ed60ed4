"""Package metadata. Install with `pip install -c constraints.txt -e '.[test]'`."""

from setuptools import find_packages, setup

setup(
    name="parallel3d",
    version="0.1.0",
    description="Pre-training of language models in three dimensions that survives its failures",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["parallel3d", "parallel3d.*", "models", "models.*"]),
    package_data={"": ["*.c", "*.h"]},
    install_requires=[
        "torch>=2.11",
        "numpy",
        "safetensors",
        "sentencepiece",
        "pyarrow",
        "zstandard",
        "pydantic>=2",
        "tqdm",
        "matplotlib",
    ],
    extras_require={
        "test": [
            "pytest",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "mypy",
            "transformers",
            "deepspeed",
            "tensorboardX",
            "scipy",
            "triton",
        ],
        "triton": ["triton"],
        "tensorboard": ["tensorboardX"],
        "deepspeed": ["deepspeed"],
        "experiments": ["scikit-learn"],
        "peers": ["transformers", "deepspeed"],
    },
)
