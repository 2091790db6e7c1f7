import sys

from hf_zero.recipes.cli import main


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
