import sys

from hf_zero.recipes.cli import console


if __name__ == "__main__":
    sys.exit(console())
