"""What pyproject.toml cannot say: the folder recipes/ is installed as data inside hf_zero."""

from setuptools import find_packages, setup


FILES = "hf_zero.recipes.files"

setup(packages=[*find_packages(include=["hf_zero*"]), FILES], package_dir={FILES: "recipes"})
