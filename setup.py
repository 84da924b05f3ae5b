"""The list of packages, which pyproject.toml cannot say: those that are found, and the CUDA sources."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["trt_kvcache*"]), "trt_kvcache._plugins"])
